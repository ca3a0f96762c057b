"""What the engine process and its client exchange: ``messages``, in ``frames`` on a socket. Both sides import this."""
