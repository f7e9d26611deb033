"""Python functions as chat rows: composed tasks with free slots, and documented functions of the standard library."""

import ast
import hashlib
import inspect
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from hybridspec_hf.training.slots import entries, split_items

# singular and plural of the things that composed functions work on, then their numeric attributes
THINGS = entries("""
    order/orders, product/products, student/students, book/books, city/cities, player/players, message/messages,
    task/tasks, city block/city blocks, invoice/invoices, movie/movies, recipe/recipes, sensor/sensors,
    ticket/tickets, user/users, song/songs, file/files, event/events, account/accounts, flight/flights,
    hotel/hotels, animal/animals, planet/planets, team/teams, lesson/lessons, garden/gardens, truck/trucks,
    patient/patients, photo/photos, vote/votes, river/rivers, tree/trees, game/games, letter/letters, route/routes,
    battery/batteries, candle/candles, printer/printers, window/windows, worker/workers, server/servers, coin/coins,
    meal/meals, package/packages, shop/shops, train/trains, camera/cameras, engine/engines
""")
FIELDS = entries("""
    price, weight, size, score, age, length, height, rating, cost, speed, distance, duration, level, year, count,
    amount, width, priority, volume, balance, depth, rank, power, temperature, points, delay, total, area
""")
TESTS = [
    ("greater than {n}", "> {n}"),
    ("less than {n}", "< {n}"),
    ("at least {n}", ">= {n}"),
    ("at most {n}", "<= {n}"),
    ("not equal to {n}", "!= {n}"),
]


def _name(text: str) -> str:
    return text.replace(" ", "_")


def _filter_fields(rng: random.Random, one: str, many: str, field: str) -> tuple[str, str]:
    words, code = rng.choice(TESTS)
    n = rng.randint(1, 100)
    words, code = words.format(n=n), code.format(n=n)
    kind = rng.choice(["list", "count", "sum", "names"])
    goal, result, name = {
        "list": (f"returns the {many} whose {field} is {words}", None, f"filter_{many}"),
        "count": (f"counts the {many} whose {field} is {words}", "len(result)", f"count_{many}"),
        "sum": (f"adds up the {field} of all {many} whose {field} is {words}", f'sum(x["{field}"] for x in result)',
                f"total_{field}"),
        "names": (f"returns the names of the {many} whose {field} is {words}", '[x["name"] for x in result]',
                  f"{one}_names"),
    }[kind]  # fmt: skip
    many, name = _name(many), _name(name)
    if rng.random() < 0.5:
        body = f'    result = [{_name(one)} for {_name(one)} in {many} if {_name(one)}["{field}"] {code}]\n'
    else:
        body = f'    result = []\n    for {_name(one)} in {many}:\n        if {_name(one)}["{field}"] {code}:\n'
        body += f"            result.append({_name(one)})\n"
    doc = goal[0].upper() + goal[1:]
    text = f'def {name}({many}):\n    """{doc}."""\n{body}    return {result or "result"}\n'
    return f"{goal}. Each one is a dict with the key `{field}`", text


def _best(rng: random.Random, one: str, many: str, field: str) -> tuple[str, str]:
    word, call, sign = rng.choice([("largest", "max", ">"), ("smallest", "min", "<")])
    goal = f"returns the {one} with the {word} {field}, or None if there are no {many}"
    one, many = _name(one), _name(many)
    head = f'def {word}_{field}({many}):\n    """Return the {one} with the {word} {field}."""\n'
    head += f"    if not {many}:\n        return None\n"
    if rng.random() < 0.5:
        return goal, head + f'    return {call}({many}, key=lambda {one}: {one}["{field}"])\n'
    body = f"    best = {many}[0]\n    for {one} in {many}[1:]:\n"
    body += f'        if {one}["{field}"] {sign} best["{field}"]:\n            best = {one}\n    return best\n'
    return goal, head + body


def _group(rng: random.Random, one: str, many: str, field: str) -> tuple[str, str]:
    key = rng.choice(["name", "color", "type", "owner", "country", "status", "month", "group"])
    one, names = _name(one), _name(many)
    if rng.random() < 0.5:
        goal = f"groups {many} by their {key} and adds up the {field} of every group"
        body = f'        totals[key] = totals.get(key, 0) + {one}["{field}"]\n'
    else:
        goal = f"counts how many {many} there are for every {key}"
        body = "        totals[key] = totals.get(key, 0) + 1\n"
    doc = goal[0].upper() + goal[1:]
    text = f'def {names}_by_{key}({names}):\n    """{doc}."""\n    totals = {{}}\n    for {one} in {names}:\n'
    return goal, text + f'        key = {one}["{key}"]\n{body}    return totals\n'


def _sort(rng: random.Random, one: str, many: str, field: str) -> tuple[str, str]:
    n, word, flag = rng.randint(2, 20), *rng.choice([("highest", "True"), ("lowest", "False")])
    goal = f"returns the {n} {many} with the {word} {field}"
    one, many = _name(one), _name(many)
    text = f'def top_{many}({many}, n={n}):\n    """Return the n {many} with the {word} {field}."""\n'
    text += (
        f'    ordered = sorted({many}, key=lambda {one}: {one}["{field}"], reverse={flag})\n    return ordered[:n]\n'
    )
    return goal, text


def _klass(rng: random.Random, one: str, many: str, field: str) -> tuple[str, str]:
    other, n = rng.choice([f for f in FIELDS if f != field]), rng.randint(2, 50)
    goal = f"builds a class for a {one} with the attributes `{field}` and `{other}` "
    goal += f"and a method that adds {n} to its {field}"
    name = "".join(part.capitalize() for part in one.split())
    text = f'class {name}:\n    """A {one} with {field} and {other}."""\n\n    def __init__(self, {field}, {other}):\n'
    text += (
        f"        self.{field} = {field}\n        self.{other} = {other}\n\n    def add_{field}(self, amount={n}):\n"
    )
    text += f'        """Add an amount to the {field} and return it."""\n        self.{field} += amount\n'
    return goal, text + f"        return self.{field}\n"


def _average(rng: random.Random, one: str, many: str, field: str) -> tuple[str, str]:
    empty = rng.choice(["0", "None", "0.0"])
    goal = f"computes the average {field} of a list of {many} and returns {empty} for an empty list"
    one, many = _name(one), _name(many)
    text = f'def average_{field}({many}):\n    """Return the average {field} of the {many}."""\n'
    text += f"    if not {many}:\n        return {empty}\n    total = 0\n    for {one} in {many}:\n"
    return goal, text + f'        total += {one}["{field}"]\n    return total / len({many})\n'


LIBRARY_PROMPT = "Write the Python function `"
TASKS = [_filter_fields, _filter_fields, _best, _group, _sort, _klass, _average]
ASKS = [
    "Write a Python function that {}.",
    "Please write Python code that {}.",
    "I need a function in Python that {}.",
    "Can you show me a short piece of Python code that {}?",
    "Implement this in Python: code that {}.",
]
REPLIES = ["", "Here is the code:\n\n", "Sure, here it is:\n\n", "This does what you want:\n\n"]


def code_row(rng: random.Random, split: str) -> dict[str, str]:
    """One composed task with its code: {"category", "split", "prompt", "answer"}."""
    one, many = rng.choice(split_items(THINGS, split)).split("/")
    goal, code = rng.choice(TASKS)(rng, one, many, rng.choice(FIELDS))
    answer = f"{rng.choice(REPLIES)}```python\n{code}```"
    return {"category": "coding", "split": split, "prompt": rng.choice(ASKS).format(goal), "answer": answer}


def library_rows(limit: int = 6000) -> Iterator[dict[str, str]]:
    """Documented functions of the running Python's standard library, 4 to 20 lines, as chat rows.

    A function's split follows from its name, so that any Python version holds out the same ones.
    """
    count = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"} & set(path.parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            row = _library_row(path.stem, node, lines) if isinstance(node, ast.FunctionDef) else None
            if row:
                yield row
                count += 1
                if count == limit:
                    return


def _library_row(module: str, node: ast.FunctionDef, lines: list[str]) -> dict[str, str] | None:
    doc = ast.get_docstring(node)
    end = node.end_lineno or node.lineno
    if not doc or not 4 <= end - node.lineno + 1 <= 20 or node.name.startswith("test"):
        return None
    code = inspect.cleandoc("\n" + "\n".join(lines[node.lineno - 1 : end]))
    summary = " ".join(doc.split("\n\n")[0].split())
    if not (20 <= len(summary) <= 160 and 80 <= len(code) <= 700 and (code + summary).isascii()):
        return None
    held_out = hashlib.md5(f"{module}.{node.name}".encode()).digest()[0] < 12
    prompt = f"{LIBRARY_PROMPT}{node.name}({ast.unparse(node.args)})` of the module `{module}`. {summary}"
    answer = f"```python\n{code}\n```"
    return {"category": "coding", "split": "test" if held_out else "train", "prompt": prompt, "answer": answer}
