"""Seeded arithmetic word problems with worked answers; names and things come from the split's own entries."""

import random
from collections.abc import Callable

from hybridspec_hf.training.slots import NAMES, entries, split_items

GOODS = entries("""
    apples, pencils, books, cookies, stamps, marbles, flowers, tickets, bottles, eggs, oranges, stickers, candles,
    shells, cards, balloons, cups, hats, coins, muffins, toy cars, bananas, buttons, plates, ribbons, lemons,
    notebooks, peaches, sandwiches, beads, socks, spoons, plants, photos, maps, postcards, crayons, keys, sweets,
    chairs, lamps, pears, baskets, kites, ropes, boxes of tea, jars of honey, paint brushes
""")
BOXES = entries("""
    boxes, bags, baskets, shelves, drawers, crates, rows, trays, jars, packs, rooms, tables, carts, bins, trucks
""")
SHOPS = entries("""
    a market, a bakery, a small shop, a school fair, a garden center, a toy store, a farm, a museum shop, a cafe, a
    bookstore, a flea market, a harbor stand, a train station kiosk, a village store
""")
TRIPS = entries("""
    bus, train, bicycle, boat, car, truck, ferry, scooter, horse, tram, van, balloon, canoe, sled
""")
DAYS = entries("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")

Pick = Callable[[list[str]], str]


def _shopping(rng: random.Random, pick: Pick) -> tuple[str, str]:
    name, goods, shop = pick(NAMES), pick(GOODS), pick(SHOPS)
    count, price, paid = rng.randint(2, 12), rng.randint(2, 9), rng.choice([50, 60, 80, 100, 120])
    cost = count * price
    question = rng.choice(
        [
            f"{name} buys {count} {goods} at {shop}. Each costs {price} dollars. {name} pays with {paid} dollars. "
            f"How much change does {name} get?",
            f"At {shop}, {goods} cost {price} dollars each. {name} has {paid} dollars and buys {count} of them. "
            f"How many dollars are left?",
        ]
    )
    answer = (
        f"The {goods} cost {count} * {price} = {cost} dollars in total. {name} had {paid} dollars, "
        f"so {paid} - {cost} = {paid - cost} dollars are left.\nThe answer is {paid - cost}."
    )
    return question, answer


def _sharing(rng: random.Random, pick: Pick) -> tuple[str, str]:
    name, goods, friends, each = pick(NAMES), pick(GOODS), rng.randint(2, 9), rng.randint(2, 12)
    rest = rng.randint(1, friends - 1)
    total = friends * each + rest
    question = rng.choice(
        [
            f"{name} has {total} {goods} and shares them equally among {friends} friends. How many {goods} does each "
            f"friend get, and how many are left over?",
            f"{friends} children share {total} {goods} that belong to {name}. Everyone gets the same number. "
            f"How many does each child get and how many remain?",
        ]
    )
    answer = (
        f"We divide {total} by {friends}. Since {friends} * {each} = {friends * each}, each one gets {each} {goods}. "
        f"Then {total} - {friends * each} = {rest}, so {rest} {goods} are left over.\n"
        f"The answer is {each} each, with {rest} left over."
    )
    return question, answer


def _packing(rng: random.Random, pick: Pick) -> tuple[str, str]:
    goods, boxes, name = pick(GOODS), pick(BOXES), pick(NAMES)
    n, each, extra, sold = rng.randint(3, 12), rng.randint(3, 12), rng.randint(2, 20), rng.randint(2, 9)
    total = n * each + extra
    question = rng.choice(
        [
            f"There are {n} {boxes} with {each} {goods} in each. {name} brings {extra} more {goods} and then takes "
            f"away {sold}. How many {goods} are there now?",
            f"{name} fills {n} {boxes} with {each} {goods} each. Later {extra} {goods} are added and {sold} are given "
            f"away. How many {goods} are there in the end?",
        ]
    )
    answer = (
        f"First, {n} {boxes} with {each} {goods} each make {n} * {each} = {n * each} {goods}. "
        f"With {extra} more there are {n * each} + {extra} = {total}. "
        f"After {sold} are gone, {total} - {sold} = {total - sold} remain.\nThe answer is {total - sold}."
    )
    return question, answer


def _travel(rng: random.Random, pick: Pick) -> tuple[str, str]:
    trip, name, speed, hours = pick(TRIPS), pick(NAMES), rng.randint(2, 12) * 5, rng.randint(2, 8)
    stop = rng.randint(1, 3)
    question = rng.choice(
        [
            f"A {trip} moves at {speed} kilometers per hour for {hours} hours, then {name} rests for {stop} hours. "
            f"How far did the {trip} go, and how long did the whole trip take?",
            f"{name} travels by {trip} for {hours} hours at {speed} kilometers per hour and waits {stop} hours on the "
            f"way. What is the distance and the total time?",
        ]
    )
    answer = (
        f"Distance is speed times time, so the {trip} went {speed} * {hours} = {speed * hours} kilometers. "
        f"The whole trip took {hours} + {stop} = {hours + stop} hours.\n"
        f"The answer is {speed * hours} kilometers in {hours + stop} hours."
    )
    return question, answer


def _ages(rng: random.Random, pick: Pick) -> tuple[str, str]:
    name, other, age, gap, years = pick(NAMES), pick(NAMES), rng.randint(5, 30), rng.randint(2, 12), rng.randint(2, 10)
    later = age + gap + years
    question = (
        f"{name} is {age} years old. {other} is {gap} years older than {name}. "
        f"How old will {other} be in {years} years?"
    )
    answer = (
        f"{other} is {age} + {gap} = {age + gap} years old now. In {years} years {other} will be "
        f"{age + gap} + {years} = {later} years old.\nThe answer is {later}."
    )
    return question, answer


def _week(rng: random.Random, pick: Pick) -> tuple[str, str]:
    name, goods, first, second = pick(NAMES), pick(GOODS), *rng.sample(DAYS, 2)
    a, times = rng.randint(4, 20), rng.randint(2, 5)
    word = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}[times]
    question = rng.choice(
        [
            f"{name} sold {a} {goods} on {first} and {word} as many on {second}. "
            f"How many {goods} did {name} sell in all?",
            f"On {first} {name} counted {a} {goods}. On {second} there were {word} as many. How many is that on both "
            f"days together?",
        ]
    )
    answer = (
        f"On {first} it was {a}. On {second} it was {times} * {a} = {times * a}. "
        f"Together that makes {a} + {times * a} = {a + times * a} {goods}.\nThe answer is {a + times * a}."
    )
    return question, answer


def _area(rng: random.Random, pick: Pick) -> tuple[str, str]:
    name, a, b = pick(NAMES), rng.randint(3, 15), rng.randint(3, 15)
    thing = rng.choice(["garden", "room", "field", "carpet", "yard", "wall", "pool", "stage"])
    question = (
        f"{name} has a {thing} that is {a} meters long and {b} meters wide. What are its area and its perimeter?"
    )
    answer = (
        f"The area is length times width: {a} * {b} = {a * b} square meters. "
        f"The perimeter is 2 * ({a} + {b}) = 2 * {a + b} = {2 * (a + b)} meters.\n"
        f"The answer is {a * b} square meters and {2 * (a + b)} meters."
    )
    return question, answer


def _saving(rng: random.Random, pick: Pick) -> tuple[str, str]:
    name, goods = pick(NAMES), pick(GOODS)
    have, week, weeks, spent = rng.randint(5, 40), rng.randint(3, 12), rng.randint(2, 9), rng.randint(4, 20)
    total = have + week * weeks
    question = (
        f"{name} has {have} dollars and saves {week} dollars every week for {weeks} weeks. Then {name} spends {spent} "
        f"dollars on {goods}. How many dollars does {name} have now?"
    )
    answer = (
        f"In {weeks} weeks {name} saves {weeks} * {week} = {weeks * week} dollars. "
        f"Together with the first {have} dollars that is {have} + {weeks * week} = {total}. "
        f"After spending {spent}, {total} - {spent} = {total - spent} dollars are left.\n"
        f"The answer is {total - spent}."
    )
    return question, answer


def _compare(rng: random.Random, pick: Pick) -> tuple[str, str]:
    name, other, goods = pick(NAMES), pick(NAMES), pick(GOODS)
    a, more = rng.randint(5, 40), rng.randint(2, 20)
    question = rng.choice(
        [
            f"{name} has {a} {goods}. {other} has {more} more {goods} than {name}. How many do they have together?",
            f"{other} collected {more} more {goods} than {name}, who collected {a}. "
            f"How many {goods} are there in total?",
        ]
    )
    answer = (
        f"{name} has {a} {goods}, and {other} has {a} + {more} = {a + more}. "
        f"Together they have {a} + {a + more} = {2 * a + more} {goods}.\nThe answer is {2 * a + more}."
    )
    return question, answer


def _equation(rng: random.Random, pick: Pick) -> tuple[str, str]:
    del pick
    factor, x, shift = rng.randint(2, 12), rng.randint(2, 15), rng.randint(1, 30)
    letter = rng.choice("xyznabkm")
    question = rng.choice(["Solve for {}: {}", "Find {} if {}.", "What is {} in the equation {}?"]).format(
        letter, f"{factor}{letter} + {shift} = {factor * x + shift}"
    )
    answer = (
        f"We start with {factor}{letter} + {shift} = {factor * x + shift}. Subtract {shift} from both sides: "
        f"{factor}{letter} = {factor * x + shift} - {shift} = {factor * x}. "
        f"Divide both sides by {factor}: {letter} = {factor * x} / {factor} = {x}.\nThe answer is {letter} = {x}."
    )
    return question, answer


def _average(rng: random.Random, pick: Pick) -> tuple[str, str]:
    name, goods, mean = pick(NAMES), pick(GOODS), rng.randint(5, 20)
    d, e = rng.randint(1, 4), rng.randint(1, 4)
    values = [mean - d, mean + d + e, mean - e]
    rng.shuffle(values)
    a, b, c = values
    question = (
        f"On three days {name} found {a}, {b} and {c} {goods}. What is the average number of {goods} for one day?"
    )
    answer = (
        f"The sum is {a} + {b} + {c} = {a + b + c}. There are 3 days, so the average is {a + b + c} / 3 = {mean}.\n"
        f"The answer is {mean}."
    )
    return question, answer


KINDS = [_shopping, _sharing, _packing, _travel, _ages, _week, _area, _saving, _compare, _equation, _average]
OPENINGS = ["", "", "", "Let us solve it step by step. ", "Here is the calculation. ", "Let us think about it. "]


def math_row(rng: random.Random, split: str) -> dict[str, str]:
    """One problem with its worked answer: {"category", "split", "prompt", "answer"}."""

    def pick(items: list[str]) -> str:
        return rng.choice(split_items(items, split))

    prompt, answer = rng.choice(KINDS)(rng, pick)
    return {"category": "math", "split": split, "prompt": prompt, "answer": rng.choice(OPENINGS) + answer}
