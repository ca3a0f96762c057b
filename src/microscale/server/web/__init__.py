"""The web page (``static/``, served by ``pages``) and ``/docs``."""
