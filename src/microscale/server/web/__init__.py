"""The web page (``static/``, served by ``pages``), ``/docs`` and ``/openapi.json``."""
