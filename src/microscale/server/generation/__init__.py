"""From a parsed request to text: prompt, engine requests, and the stream of tokens that comes back."""
