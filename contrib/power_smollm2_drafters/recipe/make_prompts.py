"""
Writes the prompts that the SmolLM2 drafters were trained on, as JSON lines for ``power train``.

Everything is synthesised from the templates below and Python's own standard library, seeded; with
``--extra`` a folder with `gsm8k.jsonl` and `mbpp.jsonl` (lines of ``{"id", "turns"}``) adds gsm8k 100-199 and
mbpp. HumanEval, MT-Bench and gsm8k 0-99 measure the drafters and are never read.

Two forms of line: ``{"id", "turns": [text]}`` is a whole question. ``{"id", "opening", "closing"}`` is the
beginning of one: the target writes the rest of the user's turn itself, which gives questions of more kinds
than templates have.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
SOLVE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"

TOPICS = """
photosynthesis; the water cycle; black holes; the French Revolution; supply and demand; compound interest;
the immune system; plate tectonics; the periodic table; machine learning; neural networks; blockchain;
renewable energy; climate change; the Roman Empire; the Silk Road; jazz music; impressionist painting; chess
openings; healthy eating; marathon training; yoga; time management; public speaking; job interviews; remote
work; teamwork; leadership; personal finance; home gardening; composting; beekeeping; coffee brewing; bread
baking; Italian cooking; Japanese culture; travel in Norway; backpacking in Peru; the Great Barrier Reef;
coral reefs; whales; honeybees; wolves; migratory birds; the Amazon rainforest; deserts; volcanoes;
earthquakes; hurricanes; the solar system; Mars exploration; telescopes; gravity; electromagnetism;
thermodynamics; quantum mechanics; evolution; DNA; vaccines; antibiotics; the human heart; sleep; memory;
mental health; meditation; friendship; ethics; democracy; human rights; inflation; taxes; international
trade; entrepreneurship; marketing; social media; cybersecurity; passwords; databases; operating systems;
the internet; web design; mobile apps; video games; board games; science fiction; detective novels; poetry;
Shakespeare; Greek mythology; fairy tales; film making; photography; architecture; bridges; electric cars;
public transport; bicycles; airplanes; space stations; robots; 3D printing; recycling; water pollution;
wildlife conservation; dogs; cats; horses; soccer; basketball; tennis; swimming; the Olympic Games;
classical music; guitar; learning languages; mathematics; probability; statistics; geometry; algebra;
calculus; prime numbers; logic puzzles
"""

CHAT = {
    "writing": """Write a short story about {t}.|Write a blog post about {t} for beginners.|Write a poem about {t}.|
        Draft a professional email to a colleague about {t}.|Write an engaging introduction for an article
        on {t}.| Write a persuasive essay that argues why {t} matters. Use fewer than 200 words.|Describe
        {t} vividly, using all five senses.|Write a product review about a book on {t}.|Write a short speech
        about {t} for a school assembly.| Compose a dialogue between two friends who disagree about {t}.""",
    "roleplay": """Imagine you are an expert on {t}. Introduce yourself and answer the question: what do beginners get
        wrong most often?|Pretend to be a pirate who loves {t}. Tell me about your day.|You are a patient
        teacher. Explain {t} to a ten-year-old.|Act as a travel guide and tell a group of visitors about
        {t}.|Take on the role of a skeptical journalist and interview an expert on {t}.|Embrace the role of
        an old sailor and give advice on {t}.""",
    "reasoning": """Compare the advantages and disadvantages of {t}.|What would happen if {t} disappeared tomorrow?
        Think step by step.|Is it true that everybody should know about {t}? Give reasons for and
        against.|What are the three most important causes and effects connected with {t}?|Two people argue
        about {t}. How could they find out who is right?""",
    "extraction": """List the key facts about {t} as bullet points.|Give me five keywords about {t} as a JSON
        list.|Summarize what is known about {t} in three sentences.|Make a table with three rows that
        compares aspects of {t}.|Which people, places and dates are connected with {t}? Answer as a list.""",
    "stem": """Explain {t} in simple terms.|How does {t} work? Describe the process step by step.|What are the most
        important principles behind {t}?|What is the difference between a theory and a fact in {t}? Give an
        example.|Describe an experiment that shows something about {t}.""",
    "humanities": """Give an overview of the history of {t}.|How has {t} changed society? Provide examples.|Discuss the
        ethical questions around {t}.|Explain how {t} is seen in different cultures.|Write a lesson plan
        about {t} for high school students.|What are some common myths about {t}?""",
    "advice": """Give me five tips about {t}.|How do I get started with {t}?|What should I read to learn more about
        {t}?|I have an exam about {t} next week. How should I prepare?|Write a step-by-step guide to {t}.""",
}

MATH = [
    "{a} has {x} {o}. {b} gives {a} {y} more {o}, and then {a} loses {z} of them. How many {o} does {a} have now?",
    "A shop sells {o} for ${x} each. {a} buys {y} of them and pays with a ${big} bill. How much change does {a} get?",
    "{a} reads {x} pages every day for {y} days, and {b} reads twice as many pages. How many pages do they read "
    "together?",
    "A box holds {x} {o}. How many {o} are in {y} boxes if {z} of the {o} are broken and thrown away?",
    "{a} earns ${x} per hour and works {y} hours a day, {z} days a week. How much does {a} earn in {w} weeks?",
    "There are {x} students in a class. {p}% of them like {o}. How many students do not like {o}?",
    "A train travels {x} miles in {y} hours. At the same speed, how far does it travel in {z} hours?",
    "{a} is {x} years old. {b} is {y} years older than {a}. In {z} years, what will be the sum of their ages?",
    "{a} bakes {x} {o} and shares them equally among {y} friends. How many {o} does each friend get, and how many are "
    "left?",
    "A rectangle is {x} cm long and {y} cm wide. What are its area and its perimeter?",
    "{a} saves ${x} each month. After {y} months {a} spends ${z} on a gift for {b}. How much money is left?",
    "A farmer has {x} chickens and {y} cows. How many legs do the animals have in total?",
    "{a} buys {x} packs of {o} with {y} in each pack, and gives {z} {o} to {b}. How many {o} does {a} keep?",
    "A jacket costs ${big}. It is on sale for {p}% off. {a} also buys a shirt for ${x}. How much does {a} pay in "
    "total?",
    "{a} walks {x} minutes to school and {y} minutes back, five days a week. How many minutes is that in {w} weeks?",
    "{a} has three times as many {o} as {b}. Together they have {four} {o}. How many {o} does {b} have?",
    "A tank holds {big} liters of water. It loses {x} liters every hour. How much water is left after {y} hours?",
    "In a garden there are {x} rows with {y} plants in each row. {p}% of the plants are tomatoes. How many are "
    "tomatoes?",
    "{a} runs {x} miles on Monday, half as many on Tuesday, and {y} miles on Wednesday. How many miles is that in "
    "total?",
    "A ticket costs ${x} for adults and ${y} for children. A family of {z} adults and {w} children goes to the show. "
    "How much do they pay?",
]
NAMES = """Anna Ben Carla David Ella Farid Grace Hiro Ivy Jamal Kate Liam Maya Noah Olga Peter Quinn Rosa Sam Tina
    Janet Toby Wendy James Marissa Carlos Eliza Jerry Mike Ken Melanie Raymond Kyle Gloria Josh Dana"""
THINGS = "apples books marbles stickers cookies pencils oranges cards balloons shells stamps coins toys cupcakes eggs "
THINGS += "bottles flowers sandwiches candles tickets"

CODE = """Write a Python function that {v} a list of numbers.|Write a Python function that takes a string and {v}
    it.|How do I use {m} in Python? Show an example.|Write a Python class for a {n}.|Explain what a {n} is
    in programming and show code.| Write a Python program that reads a file and {v} its lines.|What is the
    difference between a {n} and a list in Python?| Implement a {n} in Python with methods to add and remove
    items.|Write a unit test for a function that {v} a list.| Write a C++ program that {v} an array of
    integers.|Write a JavaScript function that {v} an array."""
VERBS = """sorts; reverses; sums; filters the even values of; removes the duplicates from; counts the elements of;
    finds the maximum of; computes the median of; splits; shuffles; finds the longest run in; checks the
    order of; rotates; flattens; groups; squares the values of; finds the second largest of; merges; counts
    the vowels of; finds the most common element of"""
NOUNS = """stack; queue; linked list; binary tree; hash table; graph; heap; matrix; bank account; shopping cart;
    cache; timer; dictionary; set; tuple; generator; decorator; context manager; iterator; priority queue"""
MODULES = """json math random re os sys collections itertools functools datetime string statistics pathlib csv time
    argparse textwrap heapq bisect fractions decimal calendar difflib copy operator shutil tempfile glob
    zipfile hashlib base64 html urllib.parse colorsys inspect ast tokenize logging configparser fnmatch
    unittest.mock email.utils ipaddress uuid secrets queue threading contextlib dataclasses enum typing
    numbers cmath array struct types weakref pprint reprlib graphlib sched subprocess signal socket ssl
    http.client http.cookies smtplib imaplib mailbox mimetypes xml.etree.ElementTree sqlite3 gzip bz2 lzma
    tarfile locale gettext cmd shlex turtle pdb timeit trace traceback dis pickle codecs"""

WORDS = "level python banana river apple stone cloud winter garden madam hello world light table seven"

OPENINGS = [  # the target completes these; what it writes is the question
    ("", ""), ("", ""), ("", ""), ("Write a Python function", ""), ("Write a function to", ""), ("How do I", ""),
    ("What is the", ""), ("Can you explain", ""), ("I need help with", ""), ("Given a", ""), ("Write a", ""),
    ("Imagine", ""), ("Could you", ""), ("Rewrite", ""), ("Describe", ""), ("Create a", ""), ("Why", ""),
    ("Please", ""),
    ("I want you to act as", ""), ("Write a program", ""), ("Solve", ""), ("Let", ""), ("Which", ""), ("Suggest", ""),
]  # fmt: skip
STORIES = [
    "{a} has", "{a} and {b} are", "A store sells", "A farmer", "There are", "{a} wants to buy", "{a} works", "If {a}",
    "{a} is", "In a school", "A bakery", "{a} bought", "Every day, {a}", "A bus", "The price of", "{a}'s family",
]  # fmt: skip


def cells(text: str, mark: str) -> list[str]:
    """The parts of a wrapped list, each on one line."""
    return [" ".join(part.split()) for part in text.split(mark) if part.strip()]


def chats(rng: random.Random, per_topic: int) -> Iterator[str]:
    """Questions in the categories people chat about."""
    templates = [template for text in CHAT.values() for template in cells(text, "|")]
    for topic in cells(TOPICS, ";"):
        for template in rng.sample(templates, per_topic):
            yield template.format(t=topic)


def sums(rng: random.Random, count: int) -> Iterator[str]:
    """Arithmetic word problems."""
    for _ in range(count):
        a, b = rng.sample(NAMES.split(), 2)
        small = [rng.randint(2, 20) for _ in range(2)]
        yield (
            rng.choice(MATH).format(
                a=a, b=b, o=rng.choice(THINGS.split()), x=rng.randint(12, 60), y=small[0], z=small[1],
                w=rng.randint(2, 6), p=rng.choice((10, 20, 25, 40, 50, 60, 75)), big=rng.choice((100, 150, 200, 240)),
                four=4 * rng.randint(3, 20),
            )
            + BOXED
        )  # fmt: skip


def programs(rng: random.Random, count: int) -> Iterator[str]:
    """Short programming questions."""
    templates, verbs, nouns = cells(CODE, "|"), cells(VERBS, ";"), cells(NOUNS, ";")
    for _ in range(count):
        yield rng.choice(templates).format(v=rng.choice(verbs), n=rng.choice(nouns), m=rng.choice(MODULES.split()))


def documented() -> Iterator[tuple[str, str, str]]:
    """(name, signature, docstring) of the standard library's public functions."""
    for name in MODULES.split():
        module = importlib.import_module(name)
        for attribute, value in sorted(vars(module).items()):
            functions = [(attribute, value)]
            if inspect.isclass(value):
                functions = [(key, item) for key, item in sorted(vars(value).items()) if not key.startswith("_")]
            for key, function in functions:
                if key.startswith("_") or not inspect.isfunction(function):
                    continue
                text = inspect.getdoc(function) or ""
                if 30 < len(text) < 500 and function.__module__ == name:
                    yield key, str(inspect.signature(function)), text


def headers(rng: random.Random, count: int) -> Iterator[str]:
    """Function headers with docstrings: a quarter each as a task with tests, to complete, to explain, to test."""
    for key, signature, text in rng.sample(found := sorted(set(documented())), min(count, len(found))):
        body = "\n    ".join(text.splitlines())
        head = f'def {key}{signature}:\n    """{body}\n    """\n'
        if len(head) > 700 or re.search(r"<.*object at", head):
            continue
        head = re.sub(r" at 0x[0-9a-f]+", "", head)  # a default's address is another one in every process
        form = rng.random()
        if form < 0.5:
            imports = rng.choice(("", "", "from typing import List\n\n\n", "import math\n\n\n"))
            yield f"{SOLVE}{imports}{head}\n```"
        elif form < 0.7:
            yield f"Complete this Python function:\n```python\n{head}```"
        elif form < 0.85:
            yield f"Explain what this function does and how to use it:\n```python\n{head}```"
        else:
            yield f"Write a Python function `{key}` that does the following: {' '.join(text.split())}"


def examples(rng: random.Random, count: int) -> Iterator[str]:
    """Small functions on lists, strings and numbers, with examples in the docstring."""
    kinds = {
        "numbers: List[int]": "[{0}, {1}, {2}]",
        "text: str": "'{3}'",
        "n: int": "{0}",
        "a: int, b: int": "{0}, {1}",
        "words: List[str]": "['{3}', '{4}']",
        "values: List[float], limit: float": "[{0}.5, {1}.0, {2}.25], {1}.0",
    }
    tasks = """Return the sum of the positive values.|Return the result in reverse order.|Check whether the input
        is sorted.| Count how many elements occur more than once.|Return the largest element, or None if
        there is none.|Return True if the input is a palindrome.|Return only the elements at even
        positions.|Compute the average, rounded to two digits.| Remove everything that is not a letter or a
        digit.|Return the greatest common divisor.|Find the shortest element.| Return the number of digits
        that are greater than five.|Insert a separator between all neighbours.|Return the running
        maximum.|Check whether any two elements add up to zero.|Return the factorial.|List all prime factors
        in ascending order.|Return the elements that are prime numbers.|Swap upper and lower case.|Count the
        distinct characters, regardless of case.|Return the elements sorted by their last character.|Return
        the n-th Fibonacci number.|Return the difference between the largest and the smallest element.|Check
        if all brackets are closed."""
    for _ in range(count):
        arguments, call = rng.choice(list(kinds.items()))
        name = "_".join(rng.sample(["count", "find", "get", "check", "sum", "sort", "filter", "max", "make"], 2))
        shown = call.format(*(rng.randint(1, 30) for _ in range(3)), *rng.sample(WORDS.split(), 2))
        task = rng.choice(cells(tasks, "|"))
        imports = "from typing import List\n\n\n" if "List" in arguments else "\n\n"
        head = f'def {name}({arguments}):\n    """ {task}\n    >>> {name}({shown})\n    {rng.randint(0, 9)}\n    """\n'
        yield f"{SOLVE}{imports}{head}\n```"


def openings(rng: random.Random, count: int) -> Iterator[dict[str, str]]:
    """Beginnings of questions: general ones, and word problems that end in the usual instruction."""
    topics = cells(TOPICS, ";")
    for index in range(count):
        if index % 2:
            a, b = rng.sample(NAMES.split(), 2)
            yield {"opening": rng.choice(STORIES).format(a=a, b=b), "closing": BOXED}
        else:
            opening, closing = rng.choice(OPENINGS)
            if rng.random() < 0.2 and opening:
                opening = f"I am interested in {rng.choice(topics)}. {opening}"
            yield {"opening": opening, "closing": closing}


def extra(folder: Path | None) -> Iterator[str]:
    """gsm8k from 100 on and mbpp; what measures the drafters is left out by name and number."""
    if folder is None:
        return
    for name, first in (("gsm8k", 100), ("mbpp", 0)):
        for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[first:]:
            yield json.loads(line)["turns"][0]


def main() -> None:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--extra", type=Path, help="folder with gsm8k.jsonl and mbpp.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)  # noqa: S311 - reproducible prompts, no secrets
    questions = [*chats(rng, 12), *sums(rng, 900), *programs(rng, 500), *headers(rng, 1000), *examples(rng, 700)]
    texts = dict.fromkeys([*questions, *extra(arguments.extra)])
    lines: list[dict[str, object]] = [{"turns": [text]} for text in texts]
    lines += openings(rng, 1800)
    rng.shuffle(lines)
    with arguments.out.open("w", encoding="utf-8") as file:
        for index, line in enumerate(lines):
            file.write(json.dumps({"id": f"prompt-{index:05d}", **line}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
