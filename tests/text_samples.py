"""Texts that tokenizers disagree on: hand-picked ones, and seeded random ones of every kind of character."""

import random
from collections.abc import Iterator

HAND_PICKED = [
    "",
    " ",
    "  ",
    "\n",
    "\r\n\r\n",
    "\t\t  \n \t",
    " leading and trailing ",
    "Hello, world! I'm sure they'll say we've it's I'd DON'T WE'LL they'RE 'S 's",
    "x" * 300,
    " " * 300,
    "a" + " " * 17 + "b" + " " * 16 + "c" + " " * 33,
    "-" * 100 + "=" * 37 + "_" * 80,
    "\n" * 50 + "end",
    "banana ananas nanananana abababababa aaaaaaaaaaaaaaaaaaaaa",
    "1234567890 3.14159 1,000,000 0xDEADBEEF 1e-9 ١٢٣ ४५६ ½ ² Ⅷ ⅓",
    "def f(x):\n    return x ** 2  # comment\n\n\nclass A:\n\tpass\r\n",
    "https://example.org/a?b=c&d=%20#e user@example.org C:\\dir\\file",
    "Ünïcödé naïve café résumé ÉCOLE École éCOLE ÀÉÎÕÜ straße ŒUVRE",
    "cafe\u0301 e\u0301\u0302\u0303 a\u0308\u0323 Z\u0351\u036b\u0343\u036aA\u0300L\u0301GO!",
    "中文字符，测试。日本語のテキスト、カタカナ　全角スペース한국어 텍스트",
    "Привет, мир! Γειά σου Κόσμε! שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇫🇷🇩🇪 ❤️ ☺︎ 🤖🤖🤖 \U0001f9d1\u200d\U0001f680",
    "zero\u200bwidth\u200cjoin\u200der\ufefffeff\u00adsoft\u2060wj",
    "nb\u00a0sp en\u2002em\u2003thin\u2009hair\u200aline\u2028para\u2029nel\u0085ogham\u1680ideo\u3000",
    "▁already▁escaped ▁ ▁▁ Ġ Ċ âĢĻ",
    "control \x01\x02\x1b[31m\x7f bell\x07 \x1c\x1d\x1e\x1f",
    "private \ue000\uf8ff \U000f0000 unassigned \u0378\U000e0fff nonchar \ufffe\uffff\U0010ffff",
    "𝓂𝒶𝓉𝒽 𝔣𝔯𝔞𝔨 𝟘𝟙𝟚 ﬁ ﬃ Ａ１ ㎏ ™ № ℃ ſ K Å",
    "<s>[INST] hi [/INST]</s><unk><|im_start|>user<|im_end|><|endoftext|><0x0A>",
    "“quotes” ‘single’ —dash– …ellipsis «guillemets» ¿qué? ¡hola!",
    "a_b-c.d,e;f:g!h?i@j#k$l%m^n&o*p(q)r[s]t{u}v|w~x`y'z\"",
    "a\u0000b",
    "camelCaseString HTTPServer iPhone XMLHttpRequest ALLCAPSword wordALLCAPS",
    "end with spaces   ",
    "mixed \n \n\n  \r \r\n\t x\n\ty",
]

# Code point ranges, each a kind of character that pre-tokenizers or byte fallback treat in its own way.
_KINDS = [
    (0x20, 0x7E),
    (0x61, 0x7A),
    (0x41, 0x5A),
    (0x30, 0x39),
    (0xA0, 0x17F),
    (0x300, 0x36F),
    (0x370, 0x52F),
    (0x590, 0x6FF),
    (0x900, 0xDFF),
    (0xE00, 0x10FF),
    (0x1100, 0x1FFF),
    (0x2000, 0x206F),
    (0x2070, 0x2BFF),
    (0x2E80, 0x33FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0xE000, 0xFFFF),
    (0x1F1E6, 0x1F9FF),
    (0x10000, 0x1FFFF),
    (0x20000, 0x10FFFF),
]
_PIECES = [
    *(
        " ",
        "  ",
        "    ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "\r",
        "'",
        "'s",
        "'LL",
        " '",
        "...",
        "!?",
        "--",
        "==",
        "//",
    ),
    *(
        "the",
        " the",
        "The",
        " and",
        "ing",
        " 1",
        "12",
        "2024",
        "É",
        "é",
        "ß",
        "e\u0301",
        "\u200d",
        "\ufe0f",
        "👍🏽",
    ),
    *("的", "。", "，", "の", "한국"),
    *("\u3000", "\u00a0", "\u2028", "▁", "▁▁", "Ġ", "<", ">", "<s>", "[INST]", "$", "`"),
]


def random_text(rng: random.Random) -> str:
    """One text of 1 to about 60 characters; half of them mix word pieces with characters of a few kinds."""
    kinds = rng.sample(_KINDS, rng.randint(1, 3))
    if rng.random() < 0.15:
        return rng.choice((" ", "\n", "a", "=", "\t ", "ab", "▁", "é", "1")) * rng.randint(1, 40)
    parts = []
    for _ in range(rng.randint(1, 24)):
        if rng.random() < 0.5:
            parts.append(rng.choice(_PIECES))
        else:
            low, high = rng.choice(kinds)
            parts.append("".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 4))))
    return "".join(parts)


def random_texts(seed: int, count: int) -> Iterator[str]:
    rng = random.Random(seed)
    return (random_text(rng) for _ in range(count))
