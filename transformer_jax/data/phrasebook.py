"""The built-in corpus: parallel phrases of any two locales, made from CLDR through Babel.

    "in 35 weeks"         "in 35 Wochen"
    "Eritrea and China"   "Eritrea und China"

A `Kind` draws something to say (a date, a list of territories, an amount) and has several forms to say it in; a phrase
is one form in the two languages, each written by Babel. A form that either locale lacks is left out, and a kind
without forms with it.

Translation is a function: where two forms of one thing read alike in the source language ("May 3, 2021" is both the
long and the medium date) the first form's translation holds, and of two names that read alike only the first is used.

Which split a phrase is in depends on a hash of its source text, so the splits are disjoint whatever their sizes and
seeds. Atoms, that is names alone and the counts that stand for the plural forms ("1 week", "2 weeks" …), cannot be
guessed from other phrases: they are in `train` only.

Text is as SentencePiece's default normaliser leaves it, so that a translation can match exactly: compatibility
characters decomposed (NFKC), no-break spaces and the zero-width non-joiner as plain spaces, direction marks dropped.

    python3 -m transformer_jax.data.phrasebook en de     # examples of every kind
"""

import datetime
import difflib
import functools
import hashlib
import itertools
import math
import random
import sys
import unicodedata
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, Literal, NamedTuple

import babel.core
import babel.dates
import babel.languages
import babel.lists
import babel.localedata
import babel.numbers
import babel.units
from babel import Locale

from transformer_jax.errors import UserError

Split = Literal["train", "dev", "test"]

SIZES = {"train": 120_000, "dev": 500, "test": 1_000}
HELD_OUT = {"dev": 5, "test": 10}  # per cent of all phrases that can be made
ATOM_SHARE = 0.08  # of the training phrases

# A number of each plural category that any language tells apart: one, two, few and many; and of the rest.
PLURALS = (1, 2, 3, 5, 11, 100)

# A century, so that the two digits of a short date stand for one year.
FIRST_DAY = datetime.date(1950, 1, 1).toordinal()
LAST_DAY = datetime.date(2049, 12, 31).toordinal()

UNITS = (
    *(f"duration-{unit}" for unit in ("century", "year", "month", "week", "day", "hour", "minute", "second")),
    *(f"length-{unit}" for unit in ("kilometer", "meter", "centimeter", "millimeter", "mile", "foot", "inch")),
    *(f"mass-{unit}" for unit in ("tonne", "kilogram", "gram", "milligram", "pound", "ounce")),
    *(f"area-{unit}" for unit in ("square-kilometer", "hectare", "square-meter", "square-mile", "acre")),
    *(f"volume-{unit}" for unit in ("cubic-meter", "liter", "milliliter", "gallon", "cup", "tablespoon", "teaspoon")),
    *(f"speed-{unit}" for unit in ("kilometer-per-hour", "meter-per-second", "mile-per-hour")),
    *(f"digital-{unit}" for unit in ("terabyte", "gigabyte", "megabyte", "kilobyte", "byte", "bit")),
    *(f"power-{unit}" for unit in ("megawatt", "kilowatt", "watt")),
    *(f"temperature-{unit}" for unit in ("celsius", "fahrenheit")),
    *(f"electric-{unit}" for unit in ("ampere", "volt", "ohm")),
)
SECONDS = dict(babel.dates.TIMEDELTA_UNITS)  # of a year, a month, …, a second
NO_TERRITORY = {"EU", "EZ", "QO", "UN", "XA", "XB", "ZZ"}

INVISIBLE = dict.fromkeys([0x00AD, 0x061C, 0x200B, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)])
INVISIBLE[0x200C] = " "

# What Babel raises where a locale lacks something, or writes what Babel does not implement.
MISSING = (LookupError, ValueError, AttributeError, NotImplementedError)

Form = Callable[[Any, Locale], str]  # says what a kind has drawn in a language


class Kind(NamedTuple):
    """One sort of phrase: `share` is its weight in the mix, `draw` thinks of something to say, `forms` say it."""

    share: int
    draw: Callable[[random.Random], Any]
    forms: tuple[Form, ...]


class Name(NamedTuple):
    """A territory, language, currency, month or weekday by its CLDR code; `names` knows what it is called."""

    family: str
    code: Any


def normalize(text: str) -> str:
    """`text` as SentencePiece's default normaliser (nmt_nfkc) leaves it; see the module's docstring."""
    if text.isascii():
        return text
    return " ".join(unicodedata.normalize("NFKC", text.translate(INVISIBLE)).split())


@functools.cache
def names(locale: Locale) -> dict[Name, str]:
    """What the locale calls its months, weekdays, and today's territories, official languages and currencies."""
    territories = [code for code in map(str, locale.territories) if len(code) == 2 and code not in NO_TERRITORY]
    languages = {
        code
        for territory in babel.core.get_global("territory_languages")
        for code in babel.languages.get_official_languages(territory, de_facto=True)
    }
    return {
        **{Name("month", month): text for month, text in locale.months["stand-alone"]["wide"].items()},
        **{Name("weekday", day): text for day, text in locale.days["stand-alone"]["wide"].items()},
        **{Name("territory", code): locale.territories[code] for code in sorted(territories)},
        **{Name("language", code): locale.languages[code] for code in sorted(languages) if code in locale.languages},
        **{Name("currency", code): locale.currencies[code] for code in currencies() if code in locale.currencies},
    }


@functools.cache
def currencies() -> tuple[str, ...]:
    """The codes of the currencies that are legal tender somewhere today."""
    tenders = (tender for rows in babel.core.get_global("territory_currencies").values() for tender in rows)
    return tuple(sorted({code for code, _, end, legal in tenders if end is None and legal}))


# How things are said. Each is a Form, or makes one.


def list_of(style: Literal["standard", "or", "unit"]) -> Form:
    return lambda listed, locale: babel.lists.format_list([names(locale)[name] for name in listed], style, locale)


def date(length: str) -> Form:
    return lambda moment, locale: babel.dates.format_date(moment, length, locale)


def time(length: str) -> Form:
    @functools.cache
    def say(clock: datetime.time, locale: Locale) -> str:
        return babel.dates.format_time(clock, length, locale=locale)

    if length == "short":
        return lambda moment, locale: say(moment.time().replace(second=0), locale)
    return lambda moment, locale: say(moment.time(), locale)


def skeleton(fields: str) -> Form:
    return lambda moment, locale: babel.dates.format_skeleton(fields, moment, locale=locale)


def date_and_time(length: Literal["full", "long", "medium", "short"]) -> Form:
    say_date, say_time = date(length), TIMES[0]

    @functools.cache
    def pattern(locale: Locale) -> str:
        return str(babel.dates.get_datetime_format(length, locale=locale)).replace("'", "")

    return lambda moment, locale: (
        pattern(locale).replace("{0}", say_time(moment, locale)).replace("{1}", say_date(moment, locale))
    )


def interval(fields: str) -> Form:
    return lambda ends, locale: babel.dates.format_interval(ends[0], ends[1], fields, locale=locale)


def relative(length: Literal["long", "short"]) -> Form:
    @functools.cache
    def say(distance: tuple[int, Any], locale: Locale) -> str:
        count, unit = distance
        return babel.dates.format_timedelta(
            count * SECONDS[unit], unit, threshold=math.inf, add_direction=True, format=length, locale=locale
        )

    return say


def measure(length: Literal["long", "short"]) -> Form:
    return functools.cache(
        lambda quantity, locale: babel.units.format_unit(quantity[0], quantity[1], length, locale=locale)
    )


def measures(quantities: tuple[tuple[int, str], ...], locale: Locale) -> str:
    return babel.lists.format_list([MEASURES[0](quantity, locale) for quantity in quantities], "unit", locale)


def amount(style: Literal["name", "standard"]) -> Form:
    return lambda priced, locale: babel.numbers.format_currency(*priced, locale=locale, format_type=style)


def number(value: Decimal, locale: Locale) -> str:
    return babel.numbers.format_decimal(value, locale=locale)


def percent(value: Decimal, locale: Locale) -> str:
    return babel.numbers.format_percent(value, locale=locale)


def name_with(form: Form) -> Form:
    def say(content: tuple[Name, datetime.date], locale: Locale) -> str:
        name, moment = content
        return babel.lists.format_list([names(locale)[name], form(moment, locale)], "unit", locale)

    return say


DATES = (date("long"), date("full"), date("medium"), date("short"), skeleton("yMMMM"), skeleton("MMMMd"))
TIMES = (time("short"), time("medium"), skeleton("hm"), skeleton("Hm"))
LISTS = (list_of("standard"), list_of("or"))
RELATIVES = (relative("long"), relative("short"))
MEASURES = (measure("long"), measure("short"))


# What there is to say.


def any_moment(rng: random.Random) -> datetime.datetime:
    day = datetime.datetime.fromordinal(rng.randint(FIRST_DAY, LAST_DAY))
    return day + datetime.timedelta(seconds=rng.randrange(86_400))


def any_days(rng: random.Random) -> tuple[datetime.date, datetime.date]:
    """Two days of a year, more often than not of one month."""
    first = any_moment(rng).date()
    month = first.month if rng.random() < 0.6 else rng.randint(1, 12)
    first, last = sorted((first.replace(day=rng.randint(1, 28)), first.replace(month=month, day=rng.randint(1, 28))))
    return first, last + datetime.timedelta(days=first == last)


def any_hours(rng: random.Random) -> tuple[datetime.time, datetime.time]:
    first, last = sorted(rng.sample(range(24), 2))
    return datetime.time(first, 5 * rng.randrange(12)), datetime.time(last, 5 * rng.randrange(12))


def any_number(rng: random.Random) -> Decimal:
    """One to five digits before the point and none to two after it."""
    whole = rng.randrange(10 ** rng.randint(1, 5))
    return Decimal(whole) if rng.random() < 0.5 else Decimal(whole) + Decimal(rng.randrange(1, 100)).scaleb(-2)


def price(cents: int, code: str) -> tuple[Decimal, str]:
    """An amount with two decimals, or none where the currency has none: what is written decides the plural."""
    return (Decimal(cents).scaleb(-2) if babel.numbers.get_currency_precision(code) else Decimal(cents // 100)), code


def any_price(rng: random.Random, codes: list[str]) -> tuple[Decimal, str]:
    cents = rng.choice((0, 0, 50, rng.randrange(100)))
    return price(rng.randrange(1, 10 ** rng.randint(1, 4)) * 100 + cents, rng.choice(codes))


def any_names(rng: random.Random, families: dict[str, list[Name]], every: list[Name]) -> tuple[Name, ...]:
    """Two or three names of one family; each name of all is as likely as any other."""
    first = rng.choice(every)
    others = [name for name in rng.sample(families[first.family], 3) if name != first]
    return first, *others[: rng.choice((1, 1, 2))]


class Phrasebook:
    """The phrases of a pair of locales: `atoms`, and the kinds that `draw` mixes."""

    def __init__(self, source: Locale, target: Locale):
        self.source, self.target = source, target
        self.atoms: dict[str, str] = {}
        self.kinds = self._kinds()

    def say(self, form: Form, content: Any) -> tuple[str, str]:
        return normalize(form(content, self.source)), normalize(form(content, self.target))

    def translate(self, forms: tuple[Form, ...], chosen: Form, content: Any) -> tuple[str, str]:
        """The chosen form of `content`, translated by the first of `forms` that reads the same."""
        text = normalize(chosen(content, self.source))
        for form in forms:
            if form is chosen or normalize(form(content, self.source)) == text:
                return text, normalize(form(content, self.target))
        raise ValueError("the chosen form is not one of the forms")

    def draw(self, rng: random.Random, kind: Kind) -> tuple[str, str]:
        return self.translate(kind.forms, rng.choice(kind.forms), kind.draw(rng))

    def stream(self, rng: random.Random, *, atom_share: float) -> Iterator[tuple[str, str]]:
        """Endless phrases of all kinds, and atoms."""
        kinds = list(self.kinds.values())
        shares = list(itertools.accumulate(kind.share for kind in kinds))
        atoms = list(self.atoms.items())
        while True:
            if rng.random() < atom_share:
                yield rng.choice(atoms)
            else:
                yield self.draw(rng, rng.choices(kinds, cum_weights=shares)[0])

    def _claim(self, forms: tuple[Form, ...], contents: list[Any]) -> bool:
        """Make atoms of the contents, all or none: none where one is missing or reads like another atom."""
        claimed = dict(self.atoms)
        try:
            for text, translation in (self.translate(forms, form, content) for content in contents for form in forms):
                if not (text and translation) or claimed.setdefault(text, translation) != translation:
                    return False
        except MISSING:
            return False
        self.atoms = claimed
        return True

    def _known(self, kind: Kind) -> Kind:
        """The kind with the forms that both locales have, as far as 20 draws tell."""
        if not kind.forms:
            return kind
        rng = random.Random(0)
        samples = [kind.draw(rng) for _ in range(20)]

        def known(form: Form) -> bool:
            try:
                return all(all(self.say(form, content)) for content in samples)
            except MISSING:
                return False

        return kind._replace(forms=tuple(form for form in kind.forms if known(form)))

    def _kinds(self) -> dict[str, Kind]:
        called = [name for name in names(self.source) if name in names(self.target)]
        every = [name for name in called if self._claim((lambda name, locale: names(locale)[name],), [name])]
        families = {family: [name for name in every if name.family == family] for family in {n.family for n in every}}
        every = [name for name in every if len(families[name.family]) > 2]
        codes = [name.code for name in families.get("currency", [])]
        codes = [code for code in codes if self._claim((amount("name"),), [price(100 * n, code) for n in PLURALS])]
        symbols = [code for code in codes if self._has_symbol(code)]
        symbols = [code for code in symbols if self._claim((amount("standard"),), [price(100, code)])]
        units = [unit for unit in UNITS if self._claim(MEASURES, [(n, unit) for n in PLURALS])]
        signed = [sign * n for sign in (1, -1) for n in PLURALS]
        spans = [unit for unit in SECONDS if self._claim(RELATIVES, [(n, unit) for n in signed])]
        places = families.get("territory", [])

        def quantity(rng: random.Random) -> tuple[int, str]:
            return rng.randrange(3, 10 ** rng.choice((2, 2, 3))), rng.choice(units)

        kinds = {
            "list": Kind(20, lambda rng: any_names(rng, families, every), LISTS if every else ()),
            "date": Kind(14, any_moment, DATES),
            "time": Kind(6, any_moment, TIMES),
            "date and time": Kind(7, any_moment, tuple(map(date_and_time, ("long", "full", "medium", "short")))),
            "dates": Kind(4, any_days, (interval("yMMMd"), interval("MMMd"))),
            "times": Kind(2, any_hours, (interval("hm"), interval("Hm"))),
            "relative time": Kind(
                10,
                lambda rng: (rng.choice((1, -1)) * rng.randrange(3, 100), rng.choice(spans)),
                RELATIVES if spans else (),
            ),
            "measure": Kind(10, quantity, MEASURES if units else ()),
            "measures": Kind(4, lambda rng: (quantity(rng), quantity(rng)), (measures,) if units else ()),
            "amount by name": Kind(8, lambda rng: any_price(rng, codes), (amount("name"),) if codes else ()),
            "amount by symbol": Kind(4, lambda rng: any_price(rng, symbols), (amount("standard"),) if symbols else ()),
            "number": Kind(5, any_number, (number,)),
            "percent": Kind(2, lambda rng: Decimal(rng.randrange(1, 1000)).scaleb(-2), (percent,)),
            "place and date": Kind(
                4,
                lambda rng: (rng.choice(places), any_moment(rng)),
                tuple(name_with(date(length)) for length in ("long", "medium", "short")) if places else (),
            ),
        }
        kinds = {title: self._known(kind) for title, kind in kinds.items()}
        return {title: kind for title, kind in kinds.items() if kind.forms}

    def _has_symbol(self, code: str) -> bool:
        return all(babel.numbers.get_currency_symbol(code, locale) != code for locale in (self.source, self.target))


def parse_locale(identifier: str, field: str) -> Locale:
    """The locale of an identifier such as `de`, `pt_BR` or `zh-Hant`. `UserError` for one that Babel does not know."""
    try:
        return Locale.parse(identifier.replace("-", "_"))
    except (ValueError, babel.core.UnknownLocaleError):
        known = babel.localedata.locale_identifiers()
        close = difflib.get_close_matches(identifier.replace("-", "_"), known, cutoff=0.4) or ["en", "de"]
        raise UserError(
            f"phrasebook: {field} is {identifier!r}, a locale that Babel does not know; "
            f"expected an identifier like {', '.join(close)}"
        ) from None


@functools.lru_cache(maxsize=4)
def phrasebook(source: str, target: str) -> Phrasebook:
    return Phrasebook(parse_locale(source, "source"), parse_locale(target, "target"))


def split_of(text: str) -> Split:
    """The split of the phrase with this source text, if it is not an atom."""
    bucket = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) % 100
    if bucket < HELD_OUT["dev"]:
        return "dev"
    return "test" if bucket < HELD_OUT["dev"] + HELD_OUT["test"] else "train"


@functools.lru_cache(maxsize=4)  # they are read twice: for the tokenizer, and for the store
def phrases(
    source: str = "en", target: str = "de", *, split: Split, seed: int = 0, size: int | None = None
) -> tuple[tuple[str, str], ...]:
    """`size` pairs of phrases of two locales; None: `SIZES[split]`. A smaller size is a beginning of a larger one.

    `train` has all atoms in reach and repeats short phrases, as a corpus does; `dev` and `test` do not repeat.
    `UserError` for an unknown locale, or a size below 1.
    """
    size = SIZES[split] if size is None else size
    if size < 1:
        raise UserError(f"phrasebook: size is {size}; expected at least 1 phrase")
    book = phrasebook(source, target)
    rng = random.Random(f"{source} {target} {split} {seed}")
    train = split == "train"
    pairs: list[tuple[str, str]] = []
    translations = dict(book.atoms)
    for text, translation in book.stream(rng, atom_share=ATOM_SHARE if train else 0.0):
        new = text not in translations
        fits = split_of(text) == split if new else train and translations[text] == translation
        if fits:
            translations[text] = translation
            pairs.append((text, translation))
        if len(pairs) == size:
            return tuple(pairs)
    raise AssertionError("the stream of phrases is endless")


def main(source: str = "en", target: str = "de") -> None:
    """Print a few phrases of every kind."""
    book = phrasebook(source, target)
    rng = random.Random(0)
    total = sum(kind.share for kind in book.kinds.values())
    for title, kind in book.kinds.items():
        print(f"{title} ({kind.share / total:.0%})")
        for _ in range(4):
            print("  {}  |  {}".format(*book.draw(rng, kind)))
    print(f"atoms, in train only ({ATOM_SHARE:.0%} of it; {len(book.atoms)} of them)")
    for pair in rng.sample(list(book.atoms.items()), 4):
        print("  {}  |  {}".format(*pair))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:3])
    except UserError as error:
        sys.exit(str(error))
