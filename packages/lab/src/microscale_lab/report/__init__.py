"""What the owner of a card sends (``microscale report``), and how it is added to the package."""
