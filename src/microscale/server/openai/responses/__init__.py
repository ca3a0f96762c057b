"""``/v1/responses``: a conversation as items, stored so that the next request can continue it.

request, input_items, tool_specs   requests
toolbox, calls                     tools → functions for the model, and its calls back to items
convert, prompt                    items → messages → the prompt
output_items, replies              deltas → items and events
store, stored_routes               stored responses
handler                            answers one request from start to end
"""
