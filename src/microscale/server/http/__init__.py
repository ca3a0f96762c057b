"""HTTP, whatever API is spoken over it: connections, bodies, replies, auth, CORS, request ids, errors."""
