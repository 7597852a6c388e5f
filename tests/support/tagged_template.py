"""Chat template in the form of Qwen3.5 to 3.8: tagged arguments, and reasoning that the prompt opens."""

TAGGED_TEMPLATE = r"""
{%- set marks = namespace(asked=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set marks.asked = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\nFunctions:\n<tools>' }}
    {%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}
    {{- '\n</tools>\nCall one as\n<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n' }}
    {{- '</function>\n</tool_call>' }}
    {%- if messages[0].role == 'system' %}{{ '\n\n' + messages[0].content | trim }}{% endif %}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content | trim + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\n' + message.content | trim + '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content | trim + '\n</tool_response><|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if (preserve_thinking is defined and preserve_thinking is true) or loop.index0 > marks.asked %}
            {{- '<think>\n' + (message.reasoning_content or '') | trim + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content | trim }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function is defined else call %}
            {%- if loop.first and message.content | trim %}{{ '\n\n' }}{% elif not loop.first %}{{ '\n' }}{% endif %}
            {{- '<tool_call>\n<function=' + call.name + '>\n' }}
            {%- for key, value in call.arguments | items %}
                {{- '<parameter=' + key + '>\n' }}
                {{- value if value is string else value | tojson }}
                {{- '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {{- '<think>\n\n</think>\n\n' if enable_thinking is defined and enable_thinking is false else '<think>\n' }}
{%- endif %}
"""
