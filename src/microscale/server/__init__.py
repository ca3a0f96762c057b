"""OpenAI's and Anthropic's APIs over HTTP: requests in, text out.

    run         bind, load, self-test, serve, drain
    app         middleware, routes, error replies
    host        what every request needs: engine, tokenizer, limits, metrics
    options     what the command line sets
    errors      every error text that a client can get
      openai/      chat, completions, responses, models, tokenize
      anthropic/   messages
      web/         the page at /, /docs and /openapi.json
      monitoring/  /health, /load, /version, /plan, /metrics
        generation/   prompt, engine requests, the stream of tokens that comes back
        structured/   from a request's fields to a checked grammar
        requests/     parsing of JSON, and the fields that all APIs share
        http/         connections, bodies, authentication, CORS, replies

The server owns the protocol, its limits and the life of the process. Tokens belong to ``engine``, text to ``text``.
"""
