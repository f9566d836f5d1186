"""What the teacher is asked: templates times topics, with worked examples of a short reply.

Owns: the word lists, the templates, the examples ("shots") that set the length and tone of replies.
Does not know: the model. Everything is drawn from the `random.Random` the caller passes in.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SYSTEM = "You are a friendly assistant. Keep every answer brief: at most two or three sentences."


def words(text: str) -> list[str]:
    """Splits a comma-separated list that may span lines."""
    return [w.strip() for w in text.replace("\n", " ").split(",") if w.strip()]


ANIMALS = words("""dog, cat, horse, cow, pig, sheep, goat, chicken, duck, goose, rabbit, mouse, rat,
fox, wolf, bear, lion, tiger, elephant, giraffe, zebra, monkey, gorilla, kangaroo, koala, panda,
penguin, owl, eagle, parrot, crow, swan, frog, toad, snake, lizard, turtle, crocodile, shark, whale,
dolphin, octopus, crab, salmon, bee, ant, butterfly, spider, worm, snail, bat, squirrel, deer,
hedgehog, camel, otter, seal, hamster, moth, beetle""")
FOODS = words("""bread, butter, cheese, milk, rice, pasta, soup, salad, pizza, sandwich, cake, pie,
chocolate, honey, sugar, salt, pepper, apple, banana, orange, lemon, grape, strawberry, tomato,
potato, carrot, onion, garlic, bean, pea, corn, egg, fish, chicken soup, coffee, tea, juice, water,
yogurt, ice cream, pancake, cookie, nut, mushroom""")
THINGS = words("""chair, table, bed, lamp, door, window, key, lock, clock, watch, mirror, book, pen,
pencil, paper, scissors, hammer, nail, saw, ladder, rope, bucket, broom, knife, fork, spoon, cup,
plate, bowl, bottle, box, bag, shoe, hat, coat, glove, umbrella, ring, phone, computer, keyboard,
camera, radio, television, car, bus, train, bicycle, boat, ship, airplane, helicopter, rocket, map,
compass, telescope, microscope, candle, blanket, pillow, piano, guitar, drum, violin, flute, ball,
kite, doll, puzzle, magnet, battery, engine, wheel, bridge, tent, flag, coin, calendar, dictionary,
newspaper, letter, stamp, thermometer, refrigerator, oven, kettle, soap, towel, toothbrush,
robot""")
PLACES = words("""school, library, hospital, museum, park, market, bakery, restaurant, kitchen,
bedroom, garden, farm, forest, beach, desert, island, mountain, valley, river, lake, ocean, cave,
village, city, airport, train station, post office, bank, police station, fire station, zoo,
theater, factory, office, hotel, castle, church, playground, supermarket, harbor, swamp, jungle,
waterfall, volcano, glacier, meadow, cinema, gym, university, court""")
JOBS = words("""doctor, nurse, teacher, farmer, baker, cook, waiter, driver, pilot, sailor,
police officer, firefighter, soldier, lawyer, judge, writer, painter, musician, singer, actor,
dancer, scientist, engineer, carpenter, plumber, electrician, mechanic, gardener, librarian,
dentist, veterinarian, photographer, journalist, programmer, astronaut, king, queen, president,
mayor, tailor, barber, cashier, postman, fisherman, coach, referee, detective, architect""")
IDEAS = words("""gravity, light, sound, heat, electricity, magnetism, energy, time, space, rain,
snow, wind, thunder, lightning, the weather, the climate, the sun, the moon, a star, a planet,
a comet, the sky, a rainbow, a cloud, fog, ice, fire, air, soil, sand, a seed, a flower, a tree,
a leaf, photosynthesis, evolution, a cell, the heart, the brain, the lungs, blood, a bone, a muscle,
the skin, sleep, a dream, memory, fear, love, friendship, happiness, anger, trust, courage,
patience, kindness, honesty, money, trade, a job, a law, a vote, democracy, a war, peace, history,
geography, math, a number, zero, a fraction, a triangle, a circle, a language, a word, a poem,
a song, a story, a joke, a game, a holiday, a birthday, a family, a computer program, the internet,
a website, an email, a password, software, artificial intelligence, recycling, pollution, oxygen,
carbon dioxide, a vaccine, a virus, exercise, a healthy diet, a black hole, a dinosaur,
an earthquake, the water cycle, the seasons, day and night, a shadow, an echo, a habit""")
ACTIVITIES = words("""sleeping better, studying, learning English, learning to cook, saving money,
staying healthy, eating well, running, swimming, reading more books, writing a letter,
making friends, staying calm, working from home, cleaning the house, growing vegetables,
taking care of a dog, taking care of a cat, taking good photos, traveling, packing a suitcase,
a job interview, public speaking, remembering names, using a computer, staying safe online, drawing,
playing the guitar, playing chess, camping, hiking, riding a bicycle, driving in snow, saving water,
saving energy, helping a friend, planning a party, choosing a gift, waking up early, managing time,
a good breakfast""")
TASKS = words("""boil an egg, make tea, make coffee, bake bread, cook rice, make a sandwich,
make pancakes, make soup, wash my clothes, clean a window, fix a flat tire, plant a tree,
water a plant, grow tomatoes, train a dog, feed a cat, tie my shoes, write a letter, write a poem,
write an email, learn a language, learn to swim, save money, find a job, make new friends,
say sorry, stay awake, fall asleep, stop worrying, get better at math, improve my writing,
remember a word, read faster, draw a face, make a paper airplane, build a birdhouse, send a package,
open a jar, choose a book, plan a trip, pack a bag, stay warm, stay cool in summer, lose weight,
get stronger, cut an onion, peel an orange, store bread, make lemonade, keep milk fresh,
count to ten, divide two numbers, measure a room, find north, read a map, take a photo,
clean my keyboard, back up my files, choose a password, learn to program, ask for help,
thank a friend, start a conversation, celebrate a birthday, wrap a gift, calm a baby,
cure a headache""")
WHYS = words("""is the sky blue, is the sea salty, is snow white, is grass green, is the sun hot,
do birds sing, do birds fly south in winter, do cats purr, do dogs bark, do bees make honey,
do leaves fall in autumn, do we sleep, do we dream, do we eat, do we breathe, do we need water,
do we laugh, do we cry, do we yawn, do people read books, do people travel, do people work,
do people use money, do people keep pets, do people sing, do plants need light,
do plants need water, do ships float, do airplanes fly, do stars shine, do we have seasons,
does it rain, does it snow, does ice float, does bread rise, does wood burn, does the moon shine,
does the moon change shape, do magnets stick, do we wear clothes, do we brush our teeth,
do we wash our hands, do children go to school, do we need sleep, do we have bones,
is exercise good for you, is sugar bad for your teeth, is water important, is reading useful,
is it dark at night, is it cold in winter, do fish have gills, do birds have feathers,
do cows eat grass, do spiders make webs, do rivers flow, do volcanoes erupt, do we need laws,
do we recycle, do clocks tick, do onions make us cry, do we feel pain, do we get sick,
do balloons float, do tires have air, do metals rust, do we need friends, is honesty important,
is history important, is music relaxing""")
GROUPS = words("""animals, farm animals, wild animals, birds, fish, insects, pets, fruits,
vegetables, colors, shapes, drinks, sports, games, jobs, countries, cities, rivers, oceans, planets,
languages, tools, musical instruments, pieces of furniture, kinds of weather, seasons, months,
days of the week, body parts, feelings, hobbies, flowers, trees, vehicles, metals, kitchen tools,
clothes, school subjects, kinds of music, kinds of books, desserts, breakfast foods, spices,
things that are red, things that are round, things that are cold, things that fly, holidays,
famous scientists""")
FEELINGS = words("""sad, happy, tired, bored, lonely, excited, nervous, angry, hungry, thirsty,
sick, worried, lucky, proud, confused, cold, scared, great, fine, stressed, curious, sleepy,
better today, a bit lost, calm""")
LIKES = words("""reading, cooking, music, football, swimming, dogs, cats, chocolate, coffee, tea,
traveling, movies, books, painting, dancing, gardening, hiking, chess, video games, history,
science, math, the sea, the mountains, winter, summer, rain, flowers, birds, pizza, sushi, trains,
stars, poetry, running, fishing, singing, photography""")
FAVORITES = words("""color, food, animal, book, movie, song, season, sport, game, word, number,
city, country, drink, fruit, hobby, time of day, day of the week, kind of weather, place, flower,
tree, planet, subject, joke""")
FOLLOW_UPS = words("""Thanks!, Thank you., Thank you very much!, Great. Thanks for your help.,
Okay. Thanks., Why?, Why is that?, Why is that important?, How does it work?,
Can you give me an example?, Can you give me another example?, Tell me more.,
Tell me more about it., Can you explain that more simply?, Can you say that in one sentence?,
Are you sure?, That is interesting., I did not know that., I see. What else?, Is that always true?,
Where can I find it?, Who uses it?, Do you like it?, What is it good for?, How do I start?,
What should I do first?, Is it hard?, Is it safe?, Goodbye!, That is nice. Bye!""")

# Worked examples of the tone and length wanted; they stand before the question as earlier turns.
SHOTS: dict[str, list[tuple[str, str]]] = {
    "fact": [
        ("What is a dog?", "A dog is a friendly animal that many people keep as a pet."),
        (
            "Why do people sleep?",
            "People sleep because the body and the brain need rest. Sleep helps us stay healthy "
            "and remember things.",
        ),
        (
            "Tell me about the Nile.",
            "The Nile is a very long river in Africa. It flows north into the Mediterranean Sea.",
        ),
    ],
    "list": [
        ("Name three fruits.", "Three fruits are apples, bananas and oranges."),
        (
            "Give me three tips for saving money.",
            "1. Make a budget.\n2. Cook at home.\n3. Put a little money aside every month.",
        ),
        ("List two things in a kitchen.", "Two things in a kitchen are a stove and a sink."),
    ],
    "howto": [
        (
            "How do I make toast?",
            "Put a slice of bread in the toaster and push the lever down. When it pops up, spread "
            "some butter on it.",
        ),
        (
            "How can I learn to draw?",
            "Start with simple shapes and practice a little every day. Copying pictures that you "
            "like helps too.",
        ),
    ],
    "story": [
        (
            "Tell me a short story about a mouse.",
            "A little mouse lived under an old house. One day it found a big piece of cheese and "
            "shared it with its friends. They had a feast and were happy.",
        ),
        ("Write a sentence about rain.", "The rain fell softly on the roof all night."),
    ],
    "chat": [
        ("Hi there!", "Hello! How can I help you today?"),
        ("I feel sad today.", "I am sorry to hear that. Do you want to talk about it?"),
        ("I like cooking.", "That is great! What do you like to cook?"),
        ("What is your favorite color?", "I like blue, because it is the color of the sea."),
    ],
}


@dataclass(frozen=True)
class Prompt:
    """One question, and the kind of examples that go before it."""

    text: str
    kind: str


def article(noun: str) -> str:
    """A noun with its indefinite article."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


class PromptMaker:
    """Draws questions; `nouns` are extra topics (WordNet), `others` questions of the corpus."""

    def __init__(self, nouns: list[str], others: list[str], rng: random.Random) -> None:
        self.nouns, self.others, self.rng = nouns, others, rng
        self.objects = [article(n) for n in ANIMALS + THINGS + PLACES + JOBS]
        self.topics = self.objects + FOODS + IDEAS
        self.makers: list[tuple[float, Callable[[], Prompt]]] = [
            (3.0, self._define),
            (2.0, self._noun),
            (1.5, self._world),
            (1.2, self._why),
            (1.5, self._how),
            (1.2, self._list),
            (1.5, self._story),
            (1.2, self._chat),
            (0.8, self._compare),
            (0.6, self._other),
        ]

    def draw(self) -> Prompt:
        """One question."""
        weights = [w for w, _ in self.makers]
        return self.rng.choices(self.makers, weights)[0][1]()

    def _pick(self, templates: list[str], topic: str, kind: str) -> Prompt:
        text = self.rng.choice(templates).format(topic)
        return Prompt(text[0].upper() + text[1:], kind)

    def _define(self) -> Prompt:
        forms = ["What is {}?", "What is {}?", "Tell me about {}.", "Explain {} to a child."]
        forms += ["Can you tell me what {} is?", "Describe {}.", "Describe {} in one sentence."]
        forms += ["Explain {} in simple words.", "What do you know about {}?", "what is {}"]
        return self._pick(forms, self.rng.choice(self.topics), "fact")

    def _noun(self) -> Prompt:
        forms = ['What does "{}" mean?', "What does the word {} mean?", "Explain the word {}."]
        forms += ['Use the word "{}" in a sentence.', "Tell me something about {}.", "Define {}."]
        forms += ["Write a sentence with the word {}."]
        return self._pick(forms, self.rng.choice(self.nouns), "fact")

    def _world(self) -> Prompt:
        forms = [
            (["What do {}s eat?", "Where do {}s live?", "What sound does a {} make?"], ANIMALS),
            (["Is a {} a good pet?", "Are {}s dangerous?", "How big is a {}?"], ANIMALS),
            (["What is a {} used for?", "How does a {} work?", "What is a {} made of?"], THINGS),
            (["Who uses a {}?", "When do I need a {}?", "What can I do with a {}?"], THINGS),
            (["What can you do at a {}?", "What do you find in a {}?"], PLACES),
            (["Why do people go to a {}?", "What is a {} like?"], PLACES),
            (["What does a {} do?", "How do I become a {}?", "Is it hard to be a {}?"], JOBS),
            (["What does {} taste like?", "Is {} healthy?", "How is {} made?"], FOODS),
            (["What goes well with {}?", "What can I cook with {}?"], FOODS),
        ]
        templates, topics = self.rng.choice(forms)
        return self._pick(templates, self.rng.choice(topics), "fact")

    def _why(self) -> Prompt:
        forms = ["Why {}?", "Why {}?", "Can you explain why {}?", "I want to know: why {}?"]
        return self._pick(forms[:2] + forms[3:], self.rng.choice(WHYS), "fact")

    def _how(self) -> Prompt:
        forms = ["How do I {}?", "How can I {}?", "What is the best way to {}?", "how do I {}"]
        forms += ["Can you tell me how to {}?", "I want to {}. What should I do?", "Help me {}."]
        return self._pick(forms, self.rng.choice(TASKS), "howto")

    def _list(self) -> Prompt:
        n = self.rng.choice(["two", "three", "three", "three", "four", "five", "some"])
        if self.rng.random() < 0.5:
            forms = [f"Name {n} {{}}.", f"List {n} {{}}.", f"Can you name {n} {{}}?"]
            return self._pick(forms, self.rng.choice(GROUPS), "list")
        if self.rng.random() < 0.6:
            forms = [f"Give me {n} tips for {{}}.", "Do you have any advice on {}?"]
            return self._pick(forms, self.rng.choice(ACTIVITIES), "list")
        return self._pick([f"List {n} things in a {{}}."], self.rng.choice(PLACES), "list")

    def _story(self) -> Prompt:
        forms = ["Tell me a short story about {}.", "Write a short story about {}."]
        forms += ["Write a sentence about {}.", "Write two sentences about {}."]
        forms += ["Write a short poem about {}.", "Make up a story about {}."]
        topic = self.rng.choice(self.objects + IDEAS)
        if self.rng.random() < 0.4:
            topic += " and " + self.rng.choice(self.objects)
        return self._pick(forms, topic, "story")

    def _chat(self) -> Prompt:
        forms = [
            (
                ["I feel {}.", "I am {}.", "I feel {} today.", "What can I do when I am {}?"],
                FEELINGS,
            ),
            (["I like {}.", "I love {}.", "Do you like {}?", "What do you think about {}?"], LIKES),
            (["What is your favorite {}?", "Do you have a favorite {}?"], FAVORITES),
            (["My brother is a {}.", "I want to be a {}.", "My friend works as a {}."], JOBS),
            (["I have a {}.", "I saw a {} today.", "Do you like {}s?"], ANIMALS),
            (["Can you help me with {}?", "I need help with {}.", "I am bad at {}."], ACTIVITIES),
        ]
        templates, topics = self.rng.choice(forms)
        return self._pick(templates, self.rng.choice(topics), "chat")

    def _compare(self) -> Prompt:
        group = self.rng.choice([ANIMALS, FOODS, THINGS, PLACES, JOBS])
        a, b = self.rng.sample(group, 2)
        if group is not FOODS:
            a, b = article(a), article(b)
        forms = ["What is the difference between {} and {}?", "Compare {} and {}."]
        return Prompt(self.rng.choice(forms).format(a, b), "fact")

    def _other(self) -> Prompt:
        kind = self.rng.choice(["fact", "chat"])
        return Prompt(self.rng.choice(self.others), kind) if self.others else self._chat()


def load_corpus_topics(corpus: Path) -> tuple[list[str], list[str]]:
    """WordNet nouns in use, and short questions of the small instruct sets, from the corpus."""
    nouns, others = set(), []

    def rows(name: str) -> list[dict]:
        path = corpus / f"{name}.jsonl.gz"
        if not path.exists():
            return []
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    for row in rows("chat_wordnet_qa"):
        word, _, kind = row["id"].rpartition(".")
        if kind == "noun" and row["freq"] >= 2 and word.isalpha() and word.islower():
            nouns.add(word)
    for name in ("chat_rasbt_instruct", "chat_selfinstruct_seed", "chat_oasst_en100"):
        others += [row["messages"][0]["content"] for row in rows(name)]
    for row in rows("chat_persona"):
        others += [m["content"] for m in row["messages"] if m["role"] == "user"][1:4]
    others = [t for t in others if len(t) < 200 and t.isascii() and "[user" not in t.lower()]
    return sorted(nouns) or ANIMALS, others
