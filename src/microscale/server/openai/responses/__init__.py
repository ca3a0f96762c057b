"""``/v1/responses``: a conversation as items, kept so that the next request can go on from it.

request, input_items, tool_specs   what comes in
toolbox, calls                     tools → functions that the model hears of, and its calls back again
convert, prompt                    items → the chat's messages → the prompt
output_items, replies              deltas → items and events
store, stored_routes               responses that are kept
handler                            one request from start to end
"""
