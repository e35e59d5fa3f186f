"""Files of tasks in the formats of llama-perplexity."""

import struct

QUESTIONS = (
    ("Cooking: A man cracks two eggs into a bowl. He", 1, "flies to the moon.", "stirs them with a fork.",
     "reads them a long letter.", "paints the bowl with a car."),
    ("Washing a dog: The dog stands in a tub of warm water. The woman", 0, "rubs soap into its wet fur.",
     "bakes the tub in an oven.", "sells the water to a bank.", "drives it over the dog."),
    ("Football: The player runs toward the ball and", 3, "sleeps on it for a year.", "eats it with some bread.",
     "asks it about the weather.", "kicks it into the net."),
    ("Gardening: She digs a small hole in the soil. Then she", 2, "swims through the hole.", "calls the police.",
     "puts a seed into it.", "closes the book."),
    ("Weather: Dark clouds cover the sky. Soon", 0, "it begins to rain.", "the clouds go to school.",
     "a piano is baked.", "the sky is sold."),
    ("Piano: He sits down at the piano, opens the score, and", 1, "cuts the grass.", "begins to play.",
     "swallows the keys.", "parks it outside."),
)  # fmt: skip
"""Context, number of the right ending, four endings."""

GAPS = (
    ("The trophy does not fit into the suitcase because the _ is too large.", "trophy", "suitcase", 1),
    ("Sarah was a much better surgeon than Maria, so _ always got the easier cases.", "Sarah", "Maria", 2),
    ("The man could not lift his son because the _ was so weak that day.", "man", "son", 1),
    ("Anna thanked Emma because _ had helped with the work.", "Anna", "Emma", 2),
    ("The water from the bottle filled the cup until the _ was empty at last.", "bottle", "cup", 1),
)


def hellaswag() -> bytes:
    return "".join("\n".join(map(str, task)) + "\n" for task in QUESTIONS).encode()


def winogrande() -> bytes:
    """Sentences with a comma are quoted. A line of no task is last: llama-perplexity passes the last line over."""
    lines = [
        f"{n},{f'{chr(34)}{text}{chr(34)}' if ',' in text else text},{first},{second},{right}"
        for n, (text, first, second, right) in enumerate(GAPS)
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def multiple_choice() -> bytes:
    """The tasks of `hellaswag`, each with as many answers as its number leaves."""
    tasks = []
    for n, (question, right, *endings) in enumerate(QUESTIONS):
        endings = endings[: max(2 + n % 3, right + 1)]
        answers = b"".join(_string(each) for each in endings)
        labels = [int(i == right) for i in range(len(endings))]
        one = struct.pack("<I", len(endings)) + answers + struct.pack(f"<{len(endings)}i", *labels)
        tasks.append(_string(question) + one + struct.pack("<I", 0))
    starts = [4 + 4 * len(tasks) + sum(map(len, tasks[:n])) for n in range(len(tasks))]
    return struct.pack(f"<{1 + len(tasks)}I", len(tasks), *starts) + b"".join(tasks)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data
