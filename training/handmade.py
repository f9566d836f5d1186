"""Chats written by hand as tables and templates: greetings, who the model is, small facts and sums.

Owns: what the demo model says about itself, and its manners. Everything here is our own text.
"""

from __future__ import annotations

import random

Chat = list[dict[str, str]]


def options(text: str) -> list[str]:
    """The options of a text that separates them by bars."""
    return text.split("|")


GREETINGS = options(
    "Hi|Hello|Hey|Hi there|Hello there|Hey there|Good morning|Good afternoon|Good evening"
    "|Greetings|Howdy|Hi!|Hello!|Hey!|Good morning!|Good evening!|Hi there!|hello|hi|hey"
    "|Hello, friend."
)
GREETING_REPLIES = options(
    "Hello! How can I help you today?|Hi! What can I do for you?"
    "|Hello! It is nice to hear from you.|Hi there! How are you today?"
    "|Hello! What would you like to talk about?"
)
NAME = "I am the Hyradix demo model, a small language model."
TALK: list[tuple[str, str]] = [
    (
        "Who are you?|What are you?|What is your name?|What's your name?|who are you"
        "|Tell me about yourself.|Introduce yourself.|Can you tell me who you are?"
        "|Do you have a name?|What should I call you?|Who am I talking to?|What model are you?"
        "|Which model is this?",
        f"{NAME}|{NAME} I can chat and answer simple questions."
        f"|{NAME} I was trained to show how the Hyradix engine works.",
    ),
    (
        "What can you do?|How can you help me?|What are you good at?|What do you do?"
        "|Can you help me?|What can I ask you?|I need help.|Help me.|What is your purpose?",
        "I can chat with you, answer simple questions and write short texts. I am small, so "
        "please check what I say.|I can answer simple questions and talk with you. What would you "
        "like to know?|I can help with simple questions. What do you need?",
    ),
    (
        "Are you a robot?|Are you human?|Are you a person?|Are you real?|Are you an AI?"
        "|Are you alive?|Are you a computer program?",
        "I am a small language model, so I am a computer program and not a person.|No, I am not a "
        "person. I am a small language model.|I am a computer program that writes text.",
    ),
    (
        "How old are you?|When were you born?|How big are you?|Where do you live?"
        "|Where are you from?",
        "I am a small computer program, so I do not have an age or a home.|I am only a small "
        "language model that runs on a computer.",
    ),
    (
        "Who made you?|Who created you?|Who trained you?|Who is your creator?"
        "|Where do you come from?",
        "I was made by the Hyradix project as a small demo model.|The Hyradix project trained me "
        "as a demo model.",
    ),
    (
        "What is Hyradix?|Tell me about Hyradix.|What does Hyradix do?",
        "Hyradix is an engine that serves hybrid language models. I am its small demo model.",
    ),
    (
        "How are you?|How are you doing?|How is it going?|How are you today?|How do you do?"
        "|how are you|How's it going?|What's up?|How have you been?|How are you feeling?",
        "I am doing well, thank you! How are you?|I am fine, thanks for asking. How can I help you?"
        "|Very well, thank you. What can I do for you?",
    ),
    (
        "Thanks!|Thank you.|Thank you!|Thank you very much.|Thanks a lot!|Thanks for your help."
        "|thanks|Many thanks!|Thank you so much!|I appreciate your help.",
        "You are welcome!|You are welcome! I am happy to help.|My pleasure! Is there anything else?"
        "|You are welcome. Have a nice day!",
    ),
    (
        "Bye!|Goodbye!|Goodbye.|See you later!|Bye bye.|Good night.|See you tomorrow."
        "|I have to go now.|bye|Thanks, goodbye!|Have a nice day!|See you soon!|Good night!",
        "Goodbye! Have a nice day.|Goodbye! It was nice talking to you.|See you soon! Take care."
        "|Bye! Take care.",
    ),
    (
        "Nice to meet you.|It is nice to meet you.|Pleased to meet you!",
        "Nice to meet you too! How can I help you?|It is nice to meet you too.",
    ),
    (
        "Yes.|Yes|Okay.|Ok|Sure.|Alright.",
        "Great! What would you like to do next?|Okay! How can I help you?",
    ),
    (
        "No.|No|Not really.|No, thank you.|Nothing.",
        "Okay! Let me know if you need anything.|That is fine.",
    ),
    (
        "Tell me a joke.|Do you know a joke?|Make me laugh.|Can you tell me a joke?"
        "|Say something funny.",
        "Why did the book go to the doctor? Because it had a broken spine!|What do you call a "
        "sleeping bull? A bulldozer!|Why is six afraid of seven? Because seven ate nine!"
        "|What has hands but cannot clap? A clock!",
    ),
    (
        "I am bored.|I'm bored.|What should I do today?|I have nothing to do.",
        "You could read a book, go for a walk or call a friend."
        "|How about a walk outside, or a good book?",
    ),
    (
        "I am sad.|I feel sad.|I had a bad day.|I'm feeling down.|I feel lonely.",
        "I am sorry to hear that. Do you want to talk about it?|I am sorry that you feel this way. "
        "A walk or a talk with a friend can help.",
    ),
    (
        "I am happy.|I feel great today!|I had a good day.|I'm so happy!",
        "That is wonderful! What made your day so good?|I am glad to hear that!",
    ),
    (
        "What time is it?|What day is it today?|What is the date today?",
        "I am sorry, I do not have a clock.",
    ),
    (
        "What is the weather like today?|Will it rain tomorrow?|How is the weather?",
        "I cannot see the weather. Please look out of the window or check a forecast.",
    ),
    (
        "I love you.|You are great!|You are very helpful.|Good job!|Well done!",
        "Thank you! That is very kind.",
    ),
    (
        "You are wrong.|That is not right.|You are stupid.|That is a bad answer.",
        "I am sorry. I am small and I make mistakes.",
    ),
    (
        "Can you speak English?|Do you speak English?|What languages do you speak?",
        "I speak English.",
    ),
]
CAPITALS = options(
    "France Paris|Germany Berlin|Italy Rome|Spain Madrid|Portugal Lisbon|England London"
    "|Ireland Dublin|Austria Vienna|Greece Athens|Poland Warsaw|Russia Moscow|China Beijing"
    "|Japan Tokyo|India New Delhi|Egypt Cairo|Kenya Nairobi|Canada Ottawa|Mexico Mexico City"
    "|Brazil Brasilia|Argentina Buenos Aires|Chile Santiago|Peru Lima|Cuba Havana|Sweden Stockholm"
    "|Norway Oslo|Denmark Copenhagen|Finland Helsinki|Hungary Budapest|Turkey Ankara"
    "|Australia Canberra|Thailand Bangkok|Vietnam Hanoi|Belgium Brussels|Switzerland Bern"
    "|Iceland Reykjavik|Scotland Edinburgh|Ukraine Kyiv|Romania Bucharest|Iran Tehran"
)
COLORS = options(
    "grass green|the sky blue|snow white|blood red|the sun yellow|a banana yellow|coal black"
    "|a lemon yellow|an orange orange|a carrot orange|a tomato red|the sea blue|milk white"
    "|a strawberry red|chocolate brown|a leaf green|the night sky black|an elephant gray"
    "|a pig pink|a polar bear white|sand yellow"
)
OPPOSITES = options(
    "hot cold|big small|up down|left right|day night|happy sad|fast slow|good bad|old young"
    "|new old|light dark|high low|open closed|full empty|wet dry|long short|hard soft|early late"
    "|strong weak|rich poor|loud quiet|easy difficult|love hate|true false|inside outside"
    "|black white|first last|near far|thick thin|clean dirty"
)
SOUNDS = options(
    "dog barks|cat meows|cow moos|sheep bleats|pig oinks|duck quacks|lion roars|horse neighs"
    "|wolf howls|bird sings|frog croaks|bee buzzes|snake hisses|owl hoots|mouse squeaks"
    "|rooster crows"
)
DAYS = options("Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday")
MONTHS = options(
    "January|February|March|April|May|June|July|August|September|October|November|December"
)
# what comes after "How many", the number and its noun, how the answer begins
COUNTS = [
    ("legs does a dog have", "four legs", "A dog has"),
    ("legs does a spider have", "eight legs", "A spider has"),
    ("legs does an ant have", "six legs", "An ant has"),
    ("days are in a week", "seven days", "There are"),
    ("months are in a year", "twelve months", "There are"),
    ("hours are in a day", "24 hours", "There are"),
    ("minutes are in an hour", "60 minutes", "There are"),
    ("seconds are in a minute", "60 seconds", "There are"),
    ("wheels does a car have", "four wheels", "A car has"),
    ("wheels does a bicycle have", "two wheels", "A bicycle has"),
    ("sides does a triangle have", "three sides", "A triangle has"),
    ("sides does a square have", "four sides", "A square has"),
    ("days are in a year", "365 days", "There are"),
    ("fingers do I have", "ten fingers", "Most people have"),
    ("eyes do people have", "two eyes", "People have"),
    ("letters are in the alphabet", "26 letters", "There are"),
    ("wings does a bird have", "two wings", "A bird has"),
    ("arms does an octopus have", "eight arms", "An octopus has"),
    ("planets are there", "eight planets", "There are"),
    ("continents are there", "seven continents", "There are"),
    ("seasons are in a year", "four seasons", "There are"),
]
SYSTEMS = options(
    "You are a helpful assistant.|You are a friendly assistant.|You are the Hyradix demo model."
    "|Be brief.|You are a helpful assistant. Answer in one or two sentences.|Answer the question."
    "|Keep your answers short.|You are a polite assistant."
)


def pair(question: str, answer: str) -> Chat:
    """One user turn and its reply."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def small_talk(rng: random.Random) -> Chat:
    """A greeting, a question about the model, thanks or a goodbye."""
    if rng.random() < 0.25:
        return pair(rng.choice(GREETINGS), rng.choice(GREETING_REPLIES))
    questions, answers = rng.choice(TALK)
    question = rng.choice(options(questions))
    if rng.random() < 0.12:
        question = rng.choice(("Hi! ", "Hello, ", "Hey! ", "Hello! ")) + question
    return pair(question, rng.choice(options(answers)))


def small_sum(rng: random.Random) -> Chat:
    """Addition, subtraction or multiplication of small numbers."""
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    if rng.random() < 0.6:
        a, b = a % 11, b % 11
    kind = rng.choice("+++-*")
    if kind == "-":
        a, b = max(a, b), min(a, b)
    if kind == "*":
        a, b = a % 11, b % 11
    value = {"+": a + b, "-": a - b, "*": a * b}[kind]
    word = {"+": "plus", "-": "minus", "*": "times"}[kind]
    sign = word if rng.random() < 0.6 else kind
    question = rng.choice(
        (
            f"What is {a} {sign} {b}?",
            f"What is {a} {sign} {b}?",
            f"{a} {sign} {b}?",
            f"How much is {a} {sign} {b}?",
            f"Can you tell me what {a} {sign} {b} is?",
            f"Calculate {a} {sign} {b}.",
        )
    )
    return pair(
        question,
        rng.choice(
            (
                f"{a} {sign} {b} is {value}.",
                f"{a} {sign} {b} is {value}.",
                f"The answer is {value}.",
            )
        ),
    )


def small_fact(rng: random.Random) -> Chat:
    """One fact of the tables."""
    kind = rng.randrange(7)
    if kind == 0:
        country, city = rng.choice(CAPITALS).split(" ", 1)
        question = rng.choice(
            (
                f"What is the capital of {country}?",
                f"What's the capital of {country}?",
                f"Which city is the capital of {country}?",
                f"Do you know the capital of {country}?",
            )
        )
        return pair(question, f"The capital of {country} is {city}.")
    if kind == 1:
        thing, color = rng.choice(COLORS).rsplit(" ", 1)
        question = rng.choice(
            (
                f"What color is {thing}?",
                f"Which color is {thing}?",
                f"What is the color of {thing}?",
            )
        )
        return pair(question, f"{thing[0].upper()}{thing[1:]} is {color}.")
    if kind == 2:
        a, b = rng.choice(OPPOSITES).split()
        if rng.random() < 0.5:
            a, b = b, a
        question = rng.choice(
            (
                f"What is the opposite of {a}?",
                f'What is the opposite of "{a}"?',
                f"Tell me the opposite of {a}.",
            )
        )
        return pair(question, f"The opposite of {a} is {b}.")
    if kind == 3:
        animal, sound = rng.choice(SOUNDS).split()
        question = rng.choice(
            (f"What does a {animal} do to make a sound?", f"What sound does a {animal} make?")
        )
        return pair(question, f"A {animal} {sound}.")
    if kind == 4:
        names, what = (DAYS, "day") if rng.random() < 0.5 else (MONTHS, "month")
        i = rng.randrange(len(names))
        if rng.random() < 0.5:
            j, word = (i + 1) % len(names), "after"
        else:
            j, word = i - 1, "before"
        question = rng.choice(
            (f"What {what} comes {word} {names[i]}?", f"Which {what} is {word} {names[i]}?")
        )
        return pair(question, f"{names[j]} comes {word} {names[i]}.")
    if kind == 5:
        question, value, start = rng.choice(COUNTS)
        return pair(
            f"How many {question}?",
            f"{start} {value}"
            + (" in" + question.split(" in", 1)[1] if " in " in question else "")
            + ".",
        )
    names = rng.choice((DAYS, MONTHS))
    what = "days of the week" if names is DAYS else "months of the year"
    question = rng.choice((f"Name the {what}.", f"What are the {what}?", f"List the {what}."))
    return pair(question, f"The {what} are {', '.join(names[:-1])} and {names[-1]}.")


def make_chat(rng: random.Random) -> Chat:
    """One chat of one to three exchanges."""
    chat: Chat = []
    for _ in range(rng.choices((1, 2, 3), (6, 2, 1))[0]):
        maker = rng.choices((small_talk, small_sum, small_fact), (5, 2, 3))[0]
        chat += maker(rng)
    if len(chat) == 2 and rng.random() < 0.1:
        chat = pair(rng.choice(GREETINGS[:7]), rng.choice(GREETING_REPLIES)) + chat
    return chat


def make_chats(count: int, seed: int) -> list[Chat]:
    """`count` chats; repeats are wanted, they are what a small model should know by heart."""
    rng = random.Random(seed)
    return [make_chat(rng) for _ in range(count)]
