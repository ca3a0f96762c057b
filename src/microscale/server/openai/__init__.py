"""OpenAI's APIs: requests, replies and what lies between."""
