"""Anthropic's Messages API: its requests become the chat's, its replies are blocks and their events.

Thinking and effort. There are three efforts; ``convert.effort_of`` maps onto them:

    thinking disabled                          low, and no reasoning is returned
    output_config.effort                       low, medium, high; xhigh and max are high
    thinking enabled, budget below 4096        low
    thinking enabled, budget below 16384       medium
    thinking enabled, budget from 16384 on     high
    anything else                              medium, the model's own default

The first line that applies decides. Reasoning comes back as ``thinking`` blocks if ``thinking`` asks for it, since
programs that do not ask read ``content[0].text``. With ``display: omitted`` the blocks are empty and their signature
carries the text, so that the model still has it when the block is handed back.

Tool input that is no JSON object comes back as ``{"INVALID_JSON": "<the text>"}``, and ``flaws`` names it.
"""
