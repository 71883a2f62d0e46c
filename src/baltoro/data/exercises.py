"""Worked exercises: arithmetic, algebra, measures, calendar, logic, small programs with results.

Every answer is computed, never remembered. A document is a function of the seed and its number:
three to five exercises of one kind, or a conversation about one.
"""

import datetime
import math
import random
from collections.abc import Callable, Iterator

from baltoro.data.config import MadeConfig
from baltoro.data.document import Document, conversation

Exercise = tuple[str, str]  # question, answer

_NAMES = (
    *("Ada", "Ben", "Clara", "Dan", "Eva", "Finn", "Gita", "Hugo"),
    *("Iris", "Jan", "Kira", "Leo", "Maya", "Noor", "Otto", "Pia"),
)
_THINGS = (
    *("apples", "pencils", "stamps", "books", "marbles"),
    *("tickets", "candles", "buttons", "cups", "shells"),
)
_MEASURES = (
    ("kilometre", "metre", 1000),
    ("metre", "centimetre", 100),
    ("kilogram", "gram", 1000),
    ("hour", "minute", 60),
    ("minute", "second", 60),
    ("day", "hour", 24),
    ("litre", "millilitre", 1000),
    ("week", "day", 7),
    ("dozen", "piece", 12),
)
_WORDS = (
    *("stone", "river", "lamp", "window", "garden", "silver"),
    *("letter", "bridge", "candle", "winter", "basket", "thunder"),
)


def documents(source: MadeConfig, seed: int) -> Iterator[Document]:
    """The documents of a made source of exercises."""
    for number in range(source.num_documents):
        rng = random.Random(f"{seed}/exercises/{number}")
        title, make = _KINDS[number % len(_KINDS)]
        name = f"{source.kind} {number}"
        if rng.random() < 0.5:
            question, answer = make(rng)
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            yield conversation(name, messages)
        else:
            exercises = [make(rng) for _ in range(rng.randrange(3, 6))]
            body = "\n\n".join(
                f"{index}. {question}\n{answer}"
                for index, (question, answer) in enumerate(exercises, 1)
            )
            yield Document(name, (f"# {title}\n\n{body}\n",))


def addition(rng: random.Random) -> Exercise:
    a, b = rng.randrange(11, 900), rng.randrange(11, 900)
    tens = b // 10 * 10
    answer = f"{a} + {tens} = {a + tens}, and {a + tens} + {b - tens} = {a + b}."
    return f"What is {a} + {b}?", answer


def subtraction(rng: random.Random) -> Exercise:
    a, b = sorted((rng.randrange(20, 900), rng.randrange(11, 900)), reverse=True)
    tens = b // 10 * 10
    answer = f"{a} - {tens} = {a - tens}, and {a - tens} - {b - tens} = {a - b}."
    return f"What is {a} - {b}?", answer


def multiplication(rng: random.Random) -> Exercise:
    a, b = rng.randrange(11, 99), rng.randrange(3, 13)
    tens, ones = a // 10 * 10, a % 10
    answer = f"{tens} x {b} = {tens * b} and {ones} x {b} = {ones * b}; together {a * b}."
    return f"What is {a} x {b}?", answer


def division(rng: random.Random) -> Exercise:
    divisor, quotient = rng.randrange(3, 13), rng.randrange(4, 60)
    rest = rng.randrange(divisor)
    a = divisor * quotient + rest
    tail = f"remainder {rest}" if rest else "with no remainder"
    answer = (
        f"{divisor} x {quotient} = {divisor * quotient}, so {a} / {divisor} is {quotient}, {tail}."
    )
    return f"Divide {a} by {divisor}.", answer


def story(rng: random.Random) -> Exercise:
    first, second = rng.sample(_NAMES, 2)
    thing = rng.choice(_THINGS)
    a, b, times = rng.randrange(5, 40), rng.randrange(2, 5), rng.randrange(2, 6)
    bought = b * times
    question = (
        f"{first} has {a} {thing}. {second} gives {first} {times} boxes with {b} {thing} each. "
        f"How many {thing} does {first} have now?"
    )
    answer = f"The boxes hold {times} x {b} = {bought} {thing}. {a} + {bought} = {a + bought}."
    return question, answer


def equation(rng: random.Random) -> Exercise:
    x, a, b = rng.randrange(-9, 13), rng.randrange(2, 10), rng.randrange(1, 30)
    right = a * x + b
    answer = f"Take {b} from both sides: {a}x = {right - b}. Divide by {a}: x = {x}."
    return f"Solve {a}x + {b} = {right}.", answer


def fraction(rng: random.Random) -> Exercise:
    b, d = rng.sample(range(2, 10), 2)
    a, c = rng.randrange(1, b + 1), rng.randrange(1, d + 1)
    bottom = math.lcm(b, d)
    top = a * bottom // b + c * bottom // d
    common = math.gcd(top, bottom)
    answer = (
        f"Over {bottom}: {a * bottom // b}/{bottom} + {c * bottom // d}/{bottom} = {top}/{bottom}"
    )
    if common > 1:
        answer += f", which is {top // common}/{bottom // common}"
    return f"Add {a}/{b} and {c}/{d}.", answer + "."


def percentage(rng: random.Random) -> Exercise:
    share, whole = rng.choice((5, 10, 15, 20, 25, 40, 50, 75)), 20 * rng.randrange(2, 40)
    answer = f"1 % of {whole} is {whole / 100:g}; {share} times that is {share * whole / 100:g}."
    return f"How much is {share} % of {whole}?", answer


def measure(rng: random.Random) -> Exercise:
    large, small, factor = rng.choice(_MEASURES)
    count = rng.randrange(2, 40)
    answer = f"One {large} is {factor} {small}s, so {count} x {factor} = {count * factor} {small}s."
    return f"How many {small}s are {count} {large}s?", answer


def weekday(rng: random.Random) -> Exercise:
    day = datetime.date(2000, 1, 1) + datetime.timedelta(days=rng.randrange(12000))
    later = rng.randrange(3, 60)
    then = day + datetime.timedelta(days=later)
    weeks, rest = divmod(later, 7)
    question = (
        f"{day.isoformat()} is a {_weekday(day)}. Which weekday and date is {later} days later?"
    )
    answer = (
        f"{later} days are {weeks} weeks and {rest} days, so it is a {_weekday(then)}: "
        f"{then.isoformat()}."
    )
    return question, answer


def clock(rng: random.Random) -> Exercise:
    start, length = rng.randrange(0, 1200), rng.randrange(10, 230)
    end = (start + length) % 1440
    hours, minutes = divmod(length, 60)
    question = (
        f"A train leaves at {_time(start)} and travels {length} minutes. When does it arrive?"
    )
    return question, f"{length} minutes are {hours} h {minutes} min. It arrives at {_time(end)}."


def sequence(rng: random.Random) -> Exercise:
    start, step = rng.randrange(1, 20), rng.randrange(2, 12)
    if rng.random() < 0.5:
        terms = [start + step * index for index in range(5)]
        rule, following = f"Each term is {step} more than the one before", start + step * 5
    else:
        ratio = rng.choice((2, 3))
        terms = [start * ratio**index for index in range(5)]
        rule, following = f"Each term is {ratio} times the one before", start * ratio**5
    return f"Continue: {', '.join(map(str, terms))}, ...", f"{rule}; the next is {following}."


def ordering(rng: random.Random) -> Exercise:
    words = rng.sample(_WORDS, 5)
    answer = f"In alphabetical order: {', '.join(sorted(words))}."
    return f"Sort these words: {', '.join(words)}.", answer


def spelling(rng: random.Random) -> Exercise:
    word = rng.choice(_WORDS)
    letter = rng.choice(word)
    count = word.count(letter)
    times = "once" if count == 1 else f"{count} times"
    answer = f"{'-'.join(word)}: {len(word)} letters; {letter!r} occurs {times}."
    return f"Spell {word!r}. How often does {letter!r} occur?", answer


def comparison(rng: random.Random) -> Exercise:
    people = rng.sample(_NAMES, 4)
    clues = [f"{people[i]} is taller than {people[i + 1]}." for i in range(3)]
    rng.shuffle(clues)
    question = f"{' '.join(clues)} Who is the shortest?"
    return question, f"From tall to short: {', '.join(people)}. The shortest is {people[3]}."


def loop_program(rng: random.Random) -> Exercise:
    start, step, count = rng.randrange(0, 9), rng.randrange(1, 6), rng.randrange(3, 6)
    values, total = [], start
    for index in range(count):
        total += step * index
        values.append(total)
    program = f"total = {start}\nfor index in range({count}):\n    total += {step} * index"
    program += "\n    print(total)"
    return (
        f"What does this print?\n```python\n{program}\n```",
        f"It prints {', '.join(map(str, values))}.",
    )


def list_program(rng: random.Random) -> Exercise:
    numbers = [rng.randrange(1, 30) for _ in range(6)]
    expression, result = rng.choice(
        [
            ("[n for n in numbers if n % 2 == 0]", [n for n in numbers if n % 2 == 0]),
            ("sorted(numbers)[:3]", sorted(numbers)[:3]),
            ("[n * n for n in numbers[:3]]", [n * n for n in numbers[:3]]),
            ("max(numbers) - min(numbers)", max(numbers) - min(numbers)),
            ("numbers[::-1]", numbers[::-1]),
            ("sum(numbers)", sum(numbers)),
        ]
    )
    return f"With numbers = {numbers}, what is {expression}?", f"{result}"


def text_program(rng: random.Random) -> Exercise:
    word, other = rng.sample(_WORDS, 2)
    cut = rng.randrange(1, 4)
    expression, result = rng.choice(
        [
            ("word.upper()", word.upper()),
            ("word[::-1]", word[::-1]),
            (f"word[:{cut}] + other", word[:cut] + other),
            ("len(word) + len(other)", len(word) + len(other)),
            ("'-'.join([word, other])", f"{word}-{other}"),
            ("word.replace('e', '_')", word.replace("e", "_")),
        ]
    )
    return f"With word = {word!r} and other = {other!r}, what is {expression}?", f"{result!r}"


def _weekday(day: datetime.date) -> str:
    names = (
        *("Monday", "Tuesday", "Wednesday", "Thursday"),
        *("Friday", "Saturday", "Sunday"),
    )
    return names[day.weekday()]


def _time(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


_KINDS: tuple[tuple[str, Callable[[random.Random], Exercise]], ...] = (
    ("Adding", addition),
    ("Taking away", subtraction),
    ("Multiplying", multiplication),
    ("Dividing", division),
    ("Stories with numbers", story),
    ("Equations", equation),
    ("Fractions", fraction),
    ("Percentages", percentage),
    ("Measures", measure),
    ("Calendar", weekday),
    ("Clock", clock),
    ("Sequences", sequence),
    ("Alphabetical order", ordering),
    ("Spelling", spelling),
    ("Who is taller", comparison),
    ("Loops in Python", loop_program),
    ("Lists in Python", list_program),
    ("Strings in Python", text_program),
)
