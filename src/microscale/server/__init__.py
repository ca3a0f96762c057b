"""OpenAI's and Anthropic's APIs over HTTP: requests in, text out.

Owns the protocol, its limits, and the life of the server. Tokens are the engine's, text is ``text``'s.

    run         bind, load, self-test, serve, drain
    app         middleware and routes
      openai/     chat, completions, responses, models, tokenize
      anthropic/  messages
      web/        the page at /, and /docs
        structured/   from a request's fields to a checked grammar
        requests/     what the requests of all APIs share: their JSON, parsed
        http/         HTTP, whatever API is spoken

The modules of this folder itself are what the APIs share: the host, prompts, generation, answers.
"""
