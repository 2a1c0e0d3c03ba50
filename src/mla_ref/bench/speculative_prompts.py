"""What `mla-ref bench speculative` writes on if no file is named: five beginnings of code.

Written for this project, of the kind that completion in an editor meets: three functions in the
middle of their bodies, a class whose methods are alike, and tests that go on as they began. The
last two repeat themselves, which a drafter likes; a bench of such text alone would flatter it.
"""

PROMPTS = {
    "sort": '''def merge_sort(items):
    """Return a new list with the items in rising order, equal items in their old order."""
    if len(items) < 2:
        return list(items)
    middle =''',
    "text": '''def count_words(path):
    """Count how often each word stands in a text file.

    Upper and lower case are the same; punctuation at the ends of a word is dropped.
    """
    counts = {}
    with open(path) as file:
        for line in file:
''',
    "dates": '''from datetime import date, timedelta


def working_days(start: date, end: date) -> int:
    """Days from start to end, both included, without Saturdays and Sundays."""
    days = 0
    while start <= end:
''',
    "class": '''class Stack:
    """A stack of numbers that knows its largest one."""

    def __init__(self):
        self.items = []

    def push(self, item):
''',
    "tests": """import unittest
from shapes import Circle, Square, Triangle


class TestArea(unittest.TestCase):
    def test_circle(self):
        self.assertEqual(Circle(radius=0).area(), 0)

    def test_square(self):
        self.assertEqual(Square(side=3).area(), 9)

    def test_triangle(self):
""",
}
