"""What a server gets that is no request: bodies that are no JSON object, and bytes that are no HTTP."""

import gzip

RAW_BODIES: dict[str, bytes] = {
    "nothing": b"",
    "cut": b'{"prompt": "a',
    "two values": b'{"prompt": "a"} {}',
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "an overlong form": b'{"prompt": "\xc0\x80"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "null": b"null",
    "an array": b"[]",
    "a string": b'"a"',
    "an object": b"{}",
    "NULs": bytes(1000),
    "blanks beyond the limit": b" " * (5 << 20),
    "a string beyond the limit": b'{"prompt": "' + b"x" * (5 << 20) + b'"}',
    "a long string": b'{"unknown": "' + b"x" * (3 << 20) + b'"',
    "many members": b"{" + b",".join(b'"%d":%d' % (n, n) for n in range(100_000)),
    "nested": b'{"a":' * 50_000,
    "a long number": b'{"prompt": "a", "max_tokens": ' + b"9" * 100_000 + b"}x",
    "gzip": gzip.compress(b'{"prompt": "a"}'),
    "a form": b"prompt=a&max_tokens=5",
}

_HOST = b"Host: localhost\r\n"
_CLOSE = b"Connection: close\r\n\r\n"
_BAD, _FOUND = (b"400",), (b"200",)


def raw_requests() -> tuple[tuple[str, bytes, tuple[bytes, ...]], ...]:
    """Name, bytes, and the statuses that are right for them."""
    health = b"GET /health HTTP/1.1\r\n" + _HOST
    posted = b"POST /v1/completions HTTP/1.1\r\n" + _HOST
    return (
        ("noise", bytes(range(256)) * 4, _BAD),
        ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500) + b"\r\n\r\n", _BAD),
        ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (b"505",)),
        ("HTTP/0.9", b"GET /health\r\n\r\n", _BAD),
        ("HTTP/1.0", b"GET /health HTTP/1.0\r\n" + _HOST + b"\r\n", _FOUND),
        ("no Host", b"GET /health HTTP/1.1\r\n" + _CLOSE, _BAD),
        ("another Host", b"GET /health HTTP/1.1\r\nHost: example.com\r\n" + _CLOSE, (b"403",)),
        ("another origin", health + b"Origin: http://example.com\r\n" + _CLOSE, (b"403",)),
        ("a long header", health + b"X: " + b"x" * 200_000 + b"\r\n" + _CLOSE, _BAD),
        ("many headers", health + b"X: y\r\n" * 20_000 + _CLOSE, (b"200", b"400")),
        ("a NUL in a header", health + b"X: \x00\r\n" + _CLOSE, _BAD),
        ("bytes in a header", health + b"X: \xff\xfe\r\n" + _CLOSE, _FOUND),
        ("no colon", health + b"X y\r\n" + _CLOSE, _BAD),
        ("two lengths", posted + b"Content-Length: 2\r\nContent-Length: 3\r\n" + _CLOSE + b"{}}", _BAD),
        ("a negative length", posted + b"Content-Length: -1\r\n" + _CLOSE, _BAD),
        ("a long length", posted + b"Content-Length: 99999999999999999999\r\n" + _CLOSE, (b"400", b"413")),
        ("a bad chunk", posted + b"Transfer-Encoding: chunked\r\n" + _CLOSE + b"zz\r\n", _BAD),
        (
            "a chunk that is cut",
            posted + b"Transfer-Encoding: chunked\r\n" + _CLOSE + b"ff\r\n{",
            (b"400", b"408"),
        ),
        ("another encoding", posted + b"Transfer-Encoding: gzip\r\n" + _CLOSE, (b"400", b"501")),
        ("a body of GET", health + b"Content-Length: 5\r\n" + _CLOSE + b"hello", _FOUND),
        (
            "Expect",
            posted + b"Expect: 100-continue\r\nContent-Length: 2\r\n" + _CLOSE + b"{}",
            (b"400", b"100"),
        ),
        (
            "Upgrade",
            health + b"Upgrade: websocket\r\nConnection: Upgrade\r\nConnection: close\r\n\r\n",
            _FOUND,
        ),
        ("two at once", health + b"\r\n" + health + _CLOSE, _FOUND),
        ("a path of bytes", b"GET /\xff\xfe HTTP/1.1\r\n" + _HOST + _CLOSE, (b"400", b"404")),
        ("a long path", b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n" + _HOST + _CLOSE, (b"400", b"404")),
        (
            "a path with a host",
            b"GET http://example.com/ HTTP/1.1\r\n" + _HOST + _CLOSE,
            (b"400", b"404", b"200"),
        ),
        ("*", b"OPTIONS * HTTP/1.1\r\n" + _HOST + _CLOSE, (b"204", b"400", b"404")),
        ("CONNECT", b"CONNECT example.com:80 HTTP/1.1\r\n" + _HOST + _CLOSE, (b"400", b"404", b"405")),
    )
