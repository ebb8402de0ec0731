"""A room of another package: a rule, a command and a tab of the page."""

from tensortap.rooms import Room, Tab

ROOM = Room(
    name="greeting",
    commands={"greet": "tensortap_greeting.greeting:greet"},
    tabs=(Tab("greeting.js", 200),),
    routes="tensortap_greeting.greeting:ROUTES",
    rules="tensortap_greeting.greeting:RULES",
)
