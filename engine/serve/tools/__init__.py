"""What clients of a server may call: built-in tools, tools of MCP servers, a proxy. All of it is off by default."""
