"""Things that the embedded model can draw: glyphs of Noto Color Emoji and their names."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Thing", "list_things", "make_plural"]

# Excluded: signs, letters and near duplicates.
_EXCLUDED = re.compile(
    r".*_button.*|.*_arrow$|.*_arrow_curving_.*|.*arrows.*|.*o’clock|.*-thirty|Japanese_(?!castle|dolls|post).*"
    r"|input_.*|keycap_.*|.*_(small|medium|medium-small|large)_square|(small|large)_.*_diamond|.*_quarter_moon.*"
    r"|waning_.*|waxing_.*|.*_sign$|.*_exclamation_mark|.*_question_mark|no_.*|non-.*|.*_symbol|.*_room|.*_banknote"
    r"|Aquarius|Aries|Cancer|Capricorn|Gemini|Leo|Libra|Ophiuchus|Pisces|Sagittarius|Scorpio|Taurus|Virgo"
    r"|copyright|registered|trade_mark|information|minus|plus|divide|multiply|infinity|wavy_dash|circled_M|om|khanda"
    r"|.*_curly_loop|curly_loop|part_alternation_mark|eight-.*|restroom|water_closet|potable_water|cinema|wireless"
    r"|passport_control|customs|left_luggage|baggage_claim|vibration_mode|mobile_phone_off|antenna_bars|ZZZ|hole"
    r"|currency_exchange|dotted_.*|menorah|latin_cross|orthodox_cross|star_of_David|star_and_crescent|wheel_of_dharma"
    r"|yin_yang|place_of_worship|prohibited|children_crossing|children|radio_button|diamond_with_a_dot|sparkle"
    r"|middle_finger|cigarette|map_of_Japan|identification_card|litter_in_bin_sign|speaker_(low|medium)_volume"
    r"|fast_.*|eject.*|heavy_.*|check_box.*|hundred_points|up-.*|down-.*|left-right_.*|globe_showing_(Asia|Europe).*"
    r"|sun_behind_(small|large)_cloud|trident_emblem|hamsa|envelope_with_arrow|incoming_envelope|last_.*|first_.*"
    r"|pregnant_.*|breast-feeding|people_.*|men_.*|women_.*|woman_and_man.*|person_(gesturing|getting|in_[bst]|tipping"
    r"|frowning|pouting|bowing|facepalming|shrugging|taking|kneeling|standing).*|.*facing_fist|leftwards_.*|rightwards_.*"
    r"|busts?_in_.*|moon_viewing.*|pine_decoration|tanabata_tree|love_hotel|sagittarius|mahjong_red_dragon|joker"
    r"|flower_playing_cards|name_badge|label|chart_increasing_with_yen|regional.*|family|mount_fuji"
)

# Names that belong to another glyph in the emoji lists: the face is easier to recognize than the whole animal.
_RENAMED = {"cat face": "cat", "cat": "standing cat"}

# Common names that the emoji lists do not have.
_EXTRA_NAMES = {
    "automobile": ["car", "red car"],
    "cat": ["kitty", "kitten", "cat head", "orange cat"],
    "dog face": ["puppy"],
    "airplane": ["plane", "jet"],
    "bicycle": ["bike"],
    "motorcycle": ["motorbike"],
    "television": ["tv", "television set"],
    "mobile phone": ["phone", "smartphone"],
    "laptop": ["notebook computer", "laptop computer"],
    "hamburger": ["burger", "cheeseburger"],
    "french fries": ["fries", "chips"],
    "soccer ball": ["football", "soccer"],
    "american football": ["rugby"],
    "wrapped gift": ["gift", "present"],
    "light bulb": ["bulb", "lamp"],
    "lady beetle": ["ladybug", "ladybird"],
    "honeybee": ["bee"],
    "doughnut": ["donut"],
    "hot beverage": ["coffee", "cup of coffee", "tea"],
    "beer mug": ["beer", "glass of beer"],
    "wine glass": ["wine", "glass of red wine"],
    "spouting whale": ["blue whale"],
    "house": ["home", "cottage", "red house"],
    "sailboat": ["boat", "sailing boat"],
    "deciduous tree": ["tree"],
    "evergreen tree": ["fir", "pine tree", "fir tree"],
    "red heart": ["heart", "love"],
    "grinning face": ["smiley", "happy face"],
    "pile of poo": ["poo", "poop"],
    "sun": ["sunshine"],
    "crescent moon": ["moon"],
    "glowing star": ["shining star"],
    "gem stone": ["gem", "diamond"],
    "top hat": ["hat"],
    "high voltage": ["lightning", "lightning bolt"],
    "locomotive": ["steam train", "steam locomotive"],
    "police car": ["cop car"],
    "fire engine": ["fire truck"],
    "delivery truck": ["truck", "lorry"],
    "military medal": ["medal"],
    "t-shirt": ["shirt", "tee shirt"],
    "running shoe": ["shoe", "sneaker"],
    "blowfish": ["pufferfish"],
    "fox": ["red fox"],
    "sparkles": ["glitter"],
    "snowman": ["snow man"],
    "birthday cake": ["cake"],
    "potted plant": ["house plant", "plant"],
    "eagle": ["bald eagle"],
    "mushroom": ["toadstool", "red mushroom"],
    "bell pepper": ["green pepper", "paprika"],
    "hot pepper": ["chili", "chilli", "red pepper"],
    "ear of corn": ["corn", "maize"],
    "eggplant": ["aubergine"],
    "tangerine": ["orange", "mandarin"],
    "desktop computer": ["computer"],
    "spaghetti": ["pasta", "noodles"],
    "ice cream": ["bowl of ice cream"],
    "jack-o-lantern": ["pumpkin", "halloween pumpkin"],
    "hiking boot": ["boot"],
    "crocodile": ["alligator"],
    "hippopotamus": ["hippo"],
    "rhinoceros": ["rhino"],
    "kitchen knife": ["knife"],
    "flying saucer": ["ufo"],
    "rabbit face": ["bunny"],
    "horse": ["racing horse"],
    "blossom": ["flower", "yellow flower"],
    "tulip": ["pink flower"],
    "hibiscus": ["red flower"],
    "bouquet": ["flowers", "bunch of flowers"],
    "teacup without handle": ["teacup", "cup of tea", "green tea"],
    "cup with straw": ["soft drink", "drink", "soda"],
    "cherries": ["cherry"],
    "grapes": ["grape"],
    "leafy green": ["lettuce"],
    "beach with umbrella": ["beach"],
    "desert island": ["island"],
    "office building": ["building", "skyscraper"],
    "cityscape": ["city", "town"],
    "bridge at night": ["bridge"],
    "game die": ["dice", "die"],
    "teddy bear": ["teddy"],
    "puzzle piece": ["puzzle"],
    "artist palette": ["palette", "paints"],
    "dagger": ["sword"],
    "jeans": ["pants", "trousers"],
    "handbag": ["bag"],
    "luggage": ["suitcase"],
    "purse": ["wallet"],
    "money bag": ["money", "bag of money"],
    "envelope": ["letter", "mail"],
    "package": ["box", "parcel"],
    "electric plug": ["plug"],
    "loudspeaker": ["speaker"],
    "musical keyboard": ["piano"],
    "ringed planet": ["planet", "saturn"],
    "globe showing americas": ["earth", "globe"],
    "merperson": ["mermaid"],
    "mage": ["wizard", "witch"],
    "angry face with horns": ["devil"],
    "prince": ["king"],
    "princess": ["queen"],
    "alarm clock": ["clock"],
    "triangular flag": ["flag", "red flag"],
    "sauropod": ["dinosaur"],
    "ogre": ["monster"],
    "crying face": ["sad face"],
    "cooking": ["fried egg"],
    "green salad": ["salad"],
    "cut of meat": ["steak"],
    "meat on bone": ["meat"],
    "pot of food": ["soup", "stew"],
    "chocolate bar": ["chocolate"],
    "beverage box": ["juice"],
    "glass of milk": ["milk"],
    "droplet": ["water", "drop of water", "water drop"],
    "cloud with rain": ["rain"],
    "snowflake": ["snow"],
    "balloon": ["red balloon", "hot air balloon"],
    "clown face": ["clown"],
    "police officer": ["policeman", "cop"],
    "basketball": ["basket ball"],
    "red apple": ["fruit"],
    "volleyball": ["ball"],
    "rose": ["red rose"],
}

_IRREGULAR = {"mouse": "mice", "goose": "geese", "ox": "oxen", "man": "men", "woman": "women", "child": "children"}
_IRREGULAR |= {"tooth": "teeth", "foot": "feet", "fish": "fish", "sheep": "sheep", "deer": "deer", "moose": "moose"}
_IRREGULAR |= {
    "leaf": "leaves",
    "wolf": "wolves",
    "elf": "elves",
    "knife": "knives",
    "scarf": "scarves",
    "person": "people",
}
_IRREGULAR |= {
    "person": "people",
    "bison": "bison",
    "squid": "squid",
    "shrimp": "shrimp",
    "bread": "breads",
    "loaf": "loaves",
}
_LINKING = {"of", "with", "on", "in", "at", "and", "holding", "without", "behind", "over", "showing", "to", "blowing"}
_PLURAL_ALREADY = {
    "glasses",
    "jeans",
    "shorts",
    "scissors",
    "chopsticks",
    "gloves",
    "socks",
    "skis",
    "grapes",
    "cherries",
}
_PLURAL_ALREADY |= {
    "peanuts",
    "blueberries",
    "books",
    "eyes",
    "lungs",
    "pancakes",
    "beans",
    "briefs",
    "chains",
    "houses",
}
_PLURAL_ALREADY |= {
    "bubbles",
    "sparkles",
    "fireworks",
    "footprints",
    "french fries",
    "goggles",
    "sunglasses",
    "noodles",
}


@dataclass(frozen=True)
class Thing:
    """A glyph, its names (the best first) and its main color: 🍎 `red apple`, `apple`, red."""

    glyph: str
    names: tuple[str, ...]
    color: str | None = None
    recolors: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)
    """For every other color that a caption can request, the names that it can use: `blue` apple."""

    @property
    def name(self) -> str:
        """Name in evaluations."""
        return self.names[0]


def list_things(has_glyph: Callable[[str], bool]) -> tuple[Thing, ...]:
    """Return all things with a glyph in the font, by code point; every name belongs to one thing only."""
    import emoji  # needed only to create the list

    chosen = {
        glyph: data
        for glyph, data in emoji.EMOJI_DATA.items()
        if len(glyph.replace("\ufe0f", "")) == 1
        and data["status"] == emoji.STATUS["fully_qualified"]
        and not _EXCLUDED.fullmatch(data["en"].strip(":"))
        and has_glyph(glyph)
    }
    words = {glyph: _as_words(data["en"]) for glyph, data in chosen.items()}
    best = {glyph: _RENAMED.get(name, name) for glyph, name in words.items()}
    taken = dict.fromkeys(best.values())
    names: dict[str, list[str]] = {glyph: [name] for glyph, name in best.items()}
    for source in (_extra_names, _aliases, _unicode_names):  # earlier sources take precedence
        for glyph in sorted(chosen):
            for name in source(glyph, best[glyph]):
                if name and name not in taken:
                    taken[name] = None
                    names[glyph].append(name)
    return tuple(Thing(glyph, tuple(names[glyph][:6])) for glyph in sorted(chosen))


def _extra_names(glyph: str, name: str) -> list[str]:
    return _EXTRA_NAMES.get(name, [])


def _aliases(glyph: str, name: str) -> list[str]:
    import emoji

    aliases = [_as_words(alias) for alias in emoji.EMOJI_DATA[glyph].get("alias", [])]
    return [alias for alias in aliases if not any(letter.isdigit() for letter in alias)]


def _unicode_names(glyph: str, name: str) -> list[str]:
    words = _as_words(unicodedata.name(glyph[0], ""))
    return [words] if 0 < len(words.split()) <= 5 else []


def _as_words(name: str) -> str:
    """Convert `:red_apple:` to `red apple`, in ASCII."""
    plain = unicodedata.normalize("NFKD", name.strip(":").replace("_", " ").replace("’", "'"))
    return " ".join("".join(letter for letter in plain if ord(letter) < 128).lower().split())


def make_plural(name: str) -> str:
    """Return the plural: `cats`, `bottles with popping cork`."""
    if name in _PLURAL_ALREADY or name.split()[-1] in _PLURAL_ALREADY:
        return name
    words = name.split()
    if words[0] in _IRREGULAR:  # people juggling
        return " ".join([_IRREGULAR[words[0]], *words[1:]])
    noun = next((index for index, word in enumerate(words) if word in _LINKING and index > 0), len(words)) - 1
    words[noun] = _plural_word(words[noun])
    return " ".join(words)


def _plural_word(word: str) -> str:
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if word.endswith("s") and not word.endswith(("ss", "us")):
        return word
    if word.endswith(("s", "x", "z", "ch", "sh")):
        return word + "es"
    if word.endswith("y") and len(word) > 1 and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + "s"
