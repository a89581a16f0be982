"""Prompts of the kinds that people send: questions, beginnings, lists, code, text to copy from."""

_NOTICE = (
    "The library will be closed on Monday, 12 May, for repairs to the roof. Books that are due on "
    "that day may be returned on Tuesday without a fee. The reading room opens again at nine."
)
_RECIPE = "Mix 200 g of flour with 3 eggs, add 400 ml of milk, and let the batter rest for an hour."
_CODE = "def area(width, height):\n    return width * height\n"
_LOG = "\n".join(
    f"2024-03-0{day} 10:0{day}:00 INFO worker {day % 3} finished job {day * 7}"
    for day in range(1, 8)
)
_QUESTIONS = (
    "What is the capital of France?",
    "How do plants make food from sunlight?",
    "Why is the sky blue?",
    "Who wrote Romeo and Juliet?",
    "How many days are there in a leap year?",
    "What does a compiler do?",
    "Name three animals that live in the sea.",
    "What is the difference between weather and climate?",
    "How can I learn to play the guitar?",
    "What should I pack for a week in the mountains?",
    "Explain what a prime number is.",
    "What is gravity?",
    "How does a bicycle stay upright?",
    "What is the boiling point of water in Fahrenheit?",
    "Give me a name for a small bakery.",
    "How do I write a polite letter of complaint?",
    "What are the primary colours?",
    "Why do we have seasons?",
    "What is machine learning?",
    "How do I boil an egg?",
)
_BEGINNINGS = (
    "Once upon a time, in a village by the sea,",
    "The history of the steam engine begins",
    "Dear Ms. Miller,\n\nThank you for",
    "It was the best of times, it was the",
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over",
    "In 1969, the first human",
    "Water is made of hydrogen and",
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "Monday, Tuesday, Wednesday,",
    "Ingredients:\n- flour\n- sugar\n-",
    "Q: What is 2 + 2?\nA: 4\nQ: What is 3 + 3?\nA:",
    "import numpy as np\n\ndef mean(values):\n",
    "for i in range(10):\n    print(",
    "<html>\n<head>\n<title>",
    "SELECT name, price FROM products WHERE",
    "A B C D E F G H I J K L",
    "la la la la la la la la",
    "Für Elise ist ein Klavierstück von",
    "El perro corre por el",
    "名前は",
)
_TASKS = (
    f"Repeat this text word for word:\n{_NOTICE}\n\nText:\n",
    f"{_NOTICE}\n\nIn short: The library will be",
    f"Text: {_NOTICE}\nThe date on which the library is closed:",
    f"{_RECIPE}\n{_RECIPE}\nMix 200 g",
    f"Rewrite this recipe for twice as many people: {_RECIPE}\nNew recipe: Mix",
    f"{_CODE}\n\n{_CODE.replace('area', 'product')}\n\ndef sum_of(width, height):\n",
    f"Add a docstring to this function:\n{_CODE}\nWith docstring:\n",
    f"{_LOG}\n",
    f"Which worker finished job 21?\n{_LOG}\nAnswer:",
    f"{_NOTICE}\n{_NOTICE}\n{_NOTICE}\n",
    "name: Ann, age: 31, town: Bern\nname: Ben, age: 44, town: Graz\nname: Cleo, age:",
    "| city | country |\n| --- | --- |\n| Paris | France |\n| Rome | Italy |\n| Madrid |",
)

PROMPTS: list[str] = [
    *(
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        for question in _QUESTIONS
    ),
    *_BEGINNINGS,
    *_TASKS,
]
