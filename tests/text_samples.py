"""Texts that tokenizers disagree on: hand-picked ones, and seeded random ones of every kind of character."""

import random
from collections.abc import Iterator, Sequence

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


# Sentences and code of many scripts, for slices that are closer to real text than random characters are.
_SENTENCES = [
    "The quick brown fox jumps over the lazy dog; it's 3.5 times faster than you'd think, isn't it?",
    "We'LL see what THEY'VE done: I'M sure she'd say 'twas O'Brien's.",
    "def main(argv: list[str]) -> int:\n    for i, x in enumerate(argv):\n\t\tprint(f'{i:>4}: {x!r}')\n    return 0\n",
    '#include <stdio.h>\r\nint main(void) { return printf("%d\\n", 0x1F & ~3) < 0; }\r\n',
    "SELECT a.id, COUNT(*) FROM t AS a WHERE a.x >= 1000000 AND b IS NOT NULL;  -- comment",
    '<html><s>old</s> <a href="https://example.org/?q=1&amp;r=2">link</a></html>',
    "XMLHttpRequest parseHTTPResponse snake_case_name SCREAMING_CASE kebab-case v1.2.3-rc4",
    "Größe, naïve Übergröße; L'été déjà à l'œuvre. ÉCOLE écoleÉcole İstanbul'da ılık",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. ЁЛКА",
    "Η γρήγορη καφέ αλεπού πηδάει πάνω από το τεμπέλικο σκυλί.",
    "الخطّ العربي جميلٌ جدًّا، أليس كذلك؟ ١٢٣٤٥٦٧",
    "שָׁלוֹם עוֹלָם, מה שלומך היום?",
    "ภาษาไทยไม่มีการเว้นวรรคระหว่างคำ ๑๒๓๔",
    "क्या आप हिन्दी में बात कर सकते हैं? १२३४५ বাংলা ভাষা தமிழ் మీరు",
    "我们今天去北京大学图书馆看书，好吗？價格是１２３元。",
    "今日はとても良い天気ですね。カタカナとﾊﾝｶｸも。",
    "안녕하세요, 오늘 날씨가 정말 좋네요! ㄱㄴㄷ ㅏㅑ",
    "cafe\u0301 nin\u0303o Z\u0351\u036ba\u0308 \u0301\u0302 a\u20dd\ufe0f",
    "👩🏽‍💻🤷‍♂️ 🇺🇳🏴\U000e0067\U000e0062\U000e007f 1️⃣ ❤️‍🔥 ☺☻ ⌚",
    "1 12 123 1234 12345 123456 1234567 12345678 123456789 1,234.50 0x00ff 1e-10 2024-01-31T23:59:59Z",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β ⇒ ∑ᵢ₌₀ⁿ xᵢ² ≤ ½ ⅔ Ⅻ ⑳ €5 £6 ¥7",
    "\ufffd\ufffd \ufeff\u200b\u2060\u00ad\u034f \u202eabc\u202c \u0000\u0001\u007f\u0080\u009f",
]


def marked_text(rng: random.Random, marks: Sequence[str]) -> str:
    """Random text, slices of sentences, and the texts of special tokens or beginnings of them, with space between."""
    parts = []
    for _ in range(rng.randint(1, 6)):
        choice = rng.random()
        if choice < 0.35 and marks:
            mark = rng.choice(marks)
            parts.append(mark if rng.random() < 0.85 else mark[: rng.randint(1, len(mark))])
        elif choice < 0.5:
            parts.append(
                rng.choice((" ", "  ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u00a0", "\v", "'", "1"))
            )
        elif choice < 0.6:
            parts.append(random_text(rng))
        else:
            sentence = rng.choice(_SENTENCES)
            start = rng.randrange(len(sentence))
            parts.append(sentence[start : start + rng.randint(1, 40)])
    return "".join(parts)


def marked_texts(seed: int, count: int, marks: Sequence[str]) -> Iterator[str]:
    rng = random.Random(seed)
    return (marked_text(rng, marks) for _ in range(count))
