"""HTTP itself, whatever API is spoken over it: the connection, request bodies, which web pages may call."""
