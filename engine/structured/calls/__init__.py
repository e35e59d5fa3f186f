"""Forms of tool calls: descriptions found by rendering a chat template, their grammars and parsers."""
