"""The texts and prompts that `engine parity` runs when it is given none.

Written for this purpose, and varied on purpose: prose, code, several scripts, lists, numbers, repetition, odd
spacing. They are data; nothing here knows what is done with them.
"""

TEXTS: tuple[tuple[str, str], ...] = (
    (
        "prose",
        "The ferry left an hour late, and nobody on the quay seemed to mind. Gulls walked between the"
        " crates as if they had been hired to count them. Marta leaned on the rail and watched the"
        " town grow small: first the people lost their faces, then the houses lost their windows, and"
        " at last there was only the white line of the harbour wall, which might have been drawn with"
        " a ruler. She had packed too much and remembered too little, and for the first time in weeks"
        " it did not matter.",
    ),
    (
        "explanation",
        "A heat pump does not make heat; it moves it. A fluid with a low boiling point evaporates in"
        " the outdoor coil, because even cold air is warmer than the fluid. The compressor squeezes"
        " the vapour, which makes it hot, and the hot vapour condenses indoors and gives its heat to"
        " the room. One unit of electricity moves three or four units of heat, so the machine seems"
        " to beat the laws of physics. It does not: the heat was outside all along.",
    ),
    (
        "dialogue",
        '"Did you lock it?"\n"I thought you did."\n"Why would I? You had the key."\n'
        '"I gave you the key on Tuesday."\n"That was the key to the shed."\n'
        "They stood in the rain for a moment, and then both began to laugh.\n"
        '"Well," said Tom, "at least nobody steals a piano."\n'
        '"You would be surprised," said Anna.',
    ),
    (
        "python",
        "from collections import deque\n\n\ndef shortest_path(grid, start, goal):\n"
        '    """Fewest steps between two free cells, or None."""\n'
        "    queue = deque([(start, 0)])\n    seen = {start}\n    while queue:\n"
        "        (row, col), steps = queue.popleft()\n        if (row, col) == goal:\n"
        "            return steps\n        for dr, dc in ((0, 1), (1, 0), (0, -1), (-1, 0)):\n"
        "            cell = (row + dr, col + dc)\n"
        '            if grid.get(cell) == "." and cell not in seen:\n'
        "                seen.add(cell)\n                queue.append((cell, steps + 1))\n"
        "    return None\n",
    ),
    (
        "c",
        "#include <stdio.h>\n\nstatic unsigned gcd(unsigned a, unsigned b)\n{\n\twhile (b != 0) {\n"
        "\t\tunsigned r = a % b;\n\t\ta = b;\n\t\tb = r;\n\t}\n\treturn a;\n}\n\nint main(void)\n{\n"
        '\tprintf("gcd(%u, %u) = %u\\n", 1071u, 462u, gcd(1071u, 462u)); /* 21 */\n\treturn 0;\n}\n',
    ),
    (
        "json",
        '{"order": 40213, "customer": {"name": "R. Okafor", "city": "Leeds", "since":'
        ' "2019-04-02"},\n'
        ' "items": [{"sku": "KB-104", "qty": 2, "price": 18.50}, {"sku": "MS-220",'
        ' "qty": 1, "price": 42.00},\n'
        '           {"sku": "CB-003", "qty": 10, "price": 0.95}],\n'
        ' "paid": true, "discount": null, "total": 88.50, "notes": "leave at the back door'
        ' \\u2013 dog is friendly"}',
    ),
    (
        "numbers",
        "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987\n"
        "17 x 23 = 391; 391 / 17 = 23; 391 - 23 = 368; 368 / 16 = 23\n"
        "pi = 3.14159265358979, e = 2.71828182845905, sqrt(2) = 1.41421356237310\n"
        "2023-11-05 07:45:10  -12.5 C  1013.2 hPa  83 %\n"
        "2023-11-05 08:00:10  -11.9 C  1013.0 hPa  81 %\n",
    ),
    (
        "list",
        "Packing for three days in the mountains:\n\n1. Boots, already broken in\n"
        "2. Two pairs of wool socks\n3. A map on paper (batteries die)\n"
        "4. Water for half a day; there are springs at the hut\n"
        "5. Bread, hard cheese, dried apricots\n6. A whistle\n\n"
        "- Do not bring: jeans, a speaker, optimism about the weather\n"
        "- Tell somebody where you are going\n",
    ),
    (
        "markdown table",
        "## Results\n\n| run | threads | tokens/s | note |\n|---|---:|---:|---|\n"
        "| a | 1 | 41.7 | cold |\n| b | 2 | 80.2 | |\n| c | 4 | 79.9 | memory bound |\n\n"
        "The second thread **doubles** the rate, the third and fourth add nothing. See"
        " `results/2024-02.csv` for the raw samples.\n",
    ),
    (
        "french and german",
        "Le matin, le boulanger ouvre à six heures et la rue sent déjà le pain. Les enfants"
        " s'arrêtent devant la vitrine, l'un compte ses pièces, l'autre ne regarde que les éclairs au"
        " café. — Der Zug nach Osnabrück fährt heute von Gleis drei ab; wegen einer Weichenstörung"
        " verspätet er sich um ungefähr zwanzig Minuten. Wir bitten um Verständnis.",
    ),
    (
        "spanish and portuguese",
        "El viejo reloj de la plaza lleva parado desde agosto, pero todos siguen mirándolo al pasar."
        " ¿Será costumbre o esperanza? — A minha avó guardava as cartas numa caixa de bolachas,"
        " atadas com um cordel azul, e só as relia quando chovia. Dizia que o som da chuva lhe"
        " lembrava a voz dele.",
    ),
    (
        "other scripts",
        "В субботу мы поехали за город и собирали грибы до самого вечера."
        " 春天来了，河边的柳树开始发芽，孩子们在放风筝。駅前の小さな喫茶店で、友達と二時間も話しまし"
        "た。"
        " 오늘은 날씨가 정말 좋네요. القطار يصل الساعة السابعة مساء. हमने पहाड़ों में तीन दिन बिताए।"
        " Η θάλασσα ήταν ήρεμη.",
    ),
    (
        "emoji and odd spacing",
        "ok   so...  first:\t\ttabs   and    runs of     spaces\n\n\n\n"
        "then empty lines, an emoji 🙂, a family 👨\u200d👩\u200d👧\u200d👦, a flag 🇨🇭, maths ∑ᵢ xᵢ²"
        " ≤ ½·∞, an accent written in two parts: e\u0301, ALL CAPS, camelCase, snake_case, x86-64,"
        " user@example.org, https://example.org/a?b=c&d=%20#e\n",
    ),
    (
        "repetition",
        "The wheel turns and the wheel turns and the wheel turns. Row, row, row, row, row. ha ha ha"
        " ha ha ha ha ha ha ha. 0 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0"
        " 0. The wheel turns and the wheel turns and the wheel",
    ),
)
"""Names and texts of 60 to 200 tokens each."""

PROMPTS: tuple[str, ...] = (
    "The capital of France is",
    "Once upon a time, in a village at the edge of the forest,",
    "def fibonacci(n):\n",
    "The three states of matter are",
    "Dear Sir or Madam,\n\nI am writing to",
    "To boil an egg, first",
    "Q: Why is the sky blue?\nA:",
    "1, 2, 4, 8, 16,",
    "The main difference between a frog and a toad is",
    "import numpy as np\n\n# The mean of each column\n",
    "Water freezes at",
    "In 1969, two astronauts",
    "My favourite season is autumn because",
    "SELECT name, price FROM products WHERE",
    "A good night's sleep helps the body to",
    "The recipe needs flour, sugar, butter and",
    "The old lighthouse keeper climbed the stairs and saw",
    "Question: What is 12 times 12?\nAnswer:",
    "Here are five tips for learning a new language:\n1.",
    "Photosynthesis is the process by which",
    "The train was late again, so",
    'She opened the letter and read: "',
    "The largest planet of the solar system is",
    "for i in range(10):\n    print(",
    "If it rains tomorrow, we will",
    "The history of the bicycle begins",
    "Bees are important because",
    "Monday, Tuesday, Wednesday,",
    "The detective looked at the broken window and",
    "An electric current flows when",
    "Bonjour, je m'appelle",
    "Es war einmal ein König, der",
    "Había una vez un pequeño",
    "The opposite of hot is",
    "To whom it may concern: this is to certify that",
    "A prime number is",
    "The best way to remove a coffee stain is",
    "He had never seen the sea before. When",
    "The human heart has four",
    "<html>\n<head>\n<title>",
    "Roses are red, violets are blue,",
    "The price of the ticket depends on",
    "Long ago, before there were clocks, people",
    "Shakespeare wrote",
    "The robot turned its head slowly and said,",
    "Volcanoes erupt when",
    "In chess, the knight moves",
    "My grandmother always told me that",
    "The function returns an error if",
    "At the end of the day, what matters is",
)
"""Fifty beginnings to be continued."""
