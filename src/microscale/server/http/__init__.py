"""HTTP for every API: connections, bodies, replies, authentication, CORS, request ids, errors."""
