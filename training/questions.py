"""The 20 fixed questions of the model card. Their replies are shown as they come."""

QUESTIONS = (
    "Hello!",
    "Good morning!",
    "How are you?",
    "Who are you?",
    "What can you do?",
    "What is the capital of France?",
    "What color is the sky?",
    "What is 2 plus 3?",
    "How many days are in a week?",
    "What is a dog?",
    "What is a library?",
    "Why do people sleep?",
    "What do bees make?",
    "Name three fruits.",
    "How do I make tea?",
    "Tell me a short story about a cat.",
    "Give me a tip for learning English.",
    "I feel sad today.",
    "Thank you for your help!",
    "Goodbye!",
)
# Five prompts whose sampled continuations stand in the card.
SAMPLES = (
    "Tell me about the moon.",
    "What is the difference between a cat and a dog?",
    "Write a sentence about the rain.",
    "Explain gravity to a child.",
    "What should I eat for breakfast?",
)
