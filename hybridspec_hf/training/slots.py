"""Word lists that fill the free slots of the corpus prompts; every twelfth entry is kept for held-out prompts."""

import random


def entries(text: str) -> list[str]:
    return [" ".join(entry.split()) for entry in text.split(",") if entry.strip()]


NAMES = entries("""
    Anna, Ben, Clara, David, Emma, Felix, Grace, Henry, Iris, Jack, Kate, Leo, Maya, Noah, Olivia, Peter, Rosa, Sam,
    Tara, Victor, Wendy, Zoe, Adam, Bella, Carlos, Diana, Ethan, Fiona, George, Hannah, Ivan, Julia, Kevin, Laura,
    Marco, Nina, Oscar, Paula, Quinn, Ruth, Simon, Tina, Umar, Vera, Will, Yara, Alice, Bruno, Cora, Dylan, Elena,
    Frank, Gina, Hugo, Isla, James, Kira, Liam, Mia, Nora, Owen, Priya, Rafael, Sofia, Tom, Uma, Vince, Willa, Amir,
    Lily, Max, Jade, Omar, Sara, Theo, Lucy, Mark, Ella, Jonas, Helen
""")

PLACES = entries("""
    a small village, a quiet library, a busy harbor, an old castle, a green forest, a mountain cabin, a seaside
    town, a dusty desert, a school playground, a space station, a farm, a hidden garden, a snowy hill, a big city, a
    lighthouse, a train station, a bakery, a museum, a deep cave, a river bank, a sunny island, a toy shop, a market
    square, an apple orchard, a hospital, a small kitchen, a tree house, a wide meadow, an empty theater, a fishing
    boat, a zoo, a frozen lake, a workshop, a circus tent, a flower shop, an attic, a rainy street, a hotel, a music
    room, a campsite, a windy beach, an underground tunnel, a bookstore, a barn, a village well, a playground, a
    garden maze, a coffee shop, a floating market, a rooftop
""")

OBJECTS = entries("""
    a red kite, an old map, a silver key, a broken clock, a lost puppy, a wooden box, a blue umbrella, a magic
    pencil, a tiny robot, a golden coin, a paper boat, a strange letter, a music box, a pair of shoes, a glass
    bottle, a warm scarf, a green stone, a small drum, a torn photo, a heavy book, a bright lantern, a toy train, a
    seashell, a wool hat, a bicycle, a basket of apples, a painted egg, a feather, a telescope, a birthday cake, a
    rusty sword, a mirror, a snow globe, a secret diary, a guitar, a wooden spoon, a big balloon, a bag of seeds, a
    puzzle piece, a candle, a flying carpet, a camera, a compass, a teapot, a paint brush, a talking parrot, a jar
    of honey, a chess board, a blanket, a violin
""")

ANIMALS = entries("""
    rabbit, fox, bear, owl, mouse, cat, dog, turtle, elephant, lion, penguin, frog, horse, squirrel, duck, wolf,
    deer, hedgehog, monkey, whale, dolphin, bee, butterfly, parrot, tiger, goat, sheep, crow, snail, dragon, otter,
    koala, panda, chicken, pig, beaver, bat, crab, ant, kangaroo
""")

TRAITS = entries("""
    brave, shy, curious, lazy, kind, clever, grumpy, lonely, funny, proud, honest, nervous, patient, greedy,
    cheerful, careful, forgetful, stubborn, gentle, quiet
""")

EVENTS = entries("""
    finds OBJECT, loses OBJECT, makes a new friend, gets lost in the rain, learns to swim, helps a stranger, wins a
    race, learns to share, builds a house, meets a talking ANIMAL, breaks a promise, wants to fly, is afraid of the
    dark, plants a tree, cooks dinner for the first time, moves to a new town, solves a mystery, saves a ANIMAL,
    writes a letter to a friend, learns to play music, misses the last train, tells a lie, fixes OBJECT, goes on a
    long journey, throws a surprise party, discovers a secret door, gets a strange gift, learns to say sorry, cannot
    sleep, hears a noise at night, starts a new job, visits a grandmother, paints a picture, forgets a birthday,
    climbs a mountain, loses a tooth, wakes up very small, trades OBJECT for OBJECT, waits for the snow, tries to
    catch the moon
""")

STORY_FORMS = entries("""
    Write a short story about HERO who EVENT., Tell me a story about HERO who EVENT in PLACE., Write a very short
    story set in PLACE where HERO EVENT., Write a bedtime story about HERO who EVENT., Write a story for children in
    which HERO EVENT. Use simple words., Please write a short tale about HERO and HERO in PLACE., Write the
    beginning of a story about HERO and OBJECT., Make up a story about OBJECT that was found in PLACE., Write a
    short story about HERO that ends with a lesson., Write a happy story about a ANIMAL and a ANIMAL., Write a short
    diary entry by NAME about a day in PLACE., Write a letter from NAME to NAME about OBJECT., Describe PLACE in a
    few sentences., Write a short paragraph about NAME who EVENT., Write a short scene in which NAME shows OBJECT to
    NAME., Write a funny story about HERO who EVENT.
""")

PERSONAS = entries("""
    a friendly pirate captain, a wise old wizard, a tired space pilot, a cheerful baker, a strict school teacher, a
    shy librarian, a medieval knight, a talking cat, a detective in an old city, a robot that wants to be human, a
    kind doctor, a farmer with many animals, a famous chef, a ghost in a castle, a young queen, a mountain guide, a
    train conductor, a museum guard, a travel agent, a street musician, a football coach, a grandmother who knits, a
    lighthouse keeper, a gardener, a sailor, a scientist in a secret lab, a shopkeeper, a bus driver, a fisherman, a
    painter, a dragon who collects books, a firefighter, a zookeeper, a clown, a judge, a tailor, a blacksmith, a
    postman, a hotel manager, a beekeeper, an astronaut on Mars, a retired spy, a circus acrobat, a yoga teacher, a
    barber, a carpenter, a news reporter, a park ranger
""")

CHAT_LINES = entries("""
    What did you do today?, Can you tell me about your job?, I am lost. Can you help me?, What is your favorite
    food?, How did you become who you are?, I feel a little sad today., What makes you happy?, I want to buy
    OBJECT., I found OBJECT in PLACE. What should I do with it?, What are you afraid of?, Tell me about your best
    friend., It is raining outside. What should we do?, Do you know a good place to rest?, I want to learn what you
    do. Where should I start?, What was the hardest day of your life?, My name is NAME. Nice to meet you!, How do
    you spend your evenings?, My ANIMAL ran away. Can you help?, What advice would you give to a child?, I am
    planning a trip to PLACE. Any tips?, Why do you work so hard?, Can you sing me a song?, What is the most
    beautiful thing you have ever seen?, I had a fight with my friend NAME., Tell me a secret., What do you think
    about the future?, I brought you OBJECT as a gift!, Do you believe in luck?, Who is your hero?, Say goodbye to
    me in your own way., I cannot sleep tonight., Tell me about the place where you grew up., How do you stay
    healthy?, What would you do with a million coins?, I am bored. Any ideas?, Could you describe your home?
""")

CHAT_FORMS = entries("""
    You are PERSONA. LINE, Pretend to be PERSONA and answer me: LINE, Act as PERSONA. LINE Keep your answer short.,
    Let us play a game. You are PERSONA and I am a visitor. LINE, Imagine you are PERSONA. I say: LINE, Stay in
    character as PERSONA. LINE
""")

TOPICS = entries("""
    the sun, the moon, rain, snow, volcanoes, earthquakes, rivers, oceans, deserts, forests, mountains, glaciers,
    clouds, lightning, wind, gravity, light, sound, heat, electricity, magnets, atoms, water, air, oxygen, salt,
    iron, gold, glass, paper, plastic, wood, steel, cells, blood, the heart, the lungs, the brain, bones, muscles,
    skin, teeth, sleep, dreams, memory, vitamins, sugar, bread, rice, milk, cheese, coffee, tea, chocolate, apples,
    tomatoes, potatoes, bees, ants, butterflies, spiders, birds, fish, whales, sharks, snakes, frogs, elephants,
    lions, penguins, dogs, cats, horses, cows, trees, flowers, seeds, grass, mushrooms, photosynthesis, evolution,
    fossils, dinosaurs, the stars, planets, Mars, Saturn, black holes, galaxies, rockets, satellites, telescopes,
    microscopes, computers, the internet, email, passwords, robots, artificial intelligence, programming,
    algorithms, databases, cars, trains, airplanes, ships, bicycles, bridges, roads, engines, batteries, solar
    panels, wind power, recycling, pollution, climate change, weather forecasts, maps, compasses, clocks, calendars,
    money, banks, taxes, trade, markets, prices, insurance, jobs, schools, libraries, museums, hospitals, police,
    laws, courts, elections, democracy, kings and queens, ancient Egypt, ancient Rome, ancient Greece, the Middle
    Ages, the printing press, the telephone, the radio, television, photography, painting, music, the piano, the
    guitar, dance, theater, poetry, novels, newspapers, languages, the alphabet, numbers, fractions, percentages,
    geometry, triangles, circles, statistics, probability, algebra, measurement, football, basketball, swimming,
    running, chess, yoga, hiking, camping, gardening, cooking, baking, sewing, knitting, fishing, vaccines, germs,
    allergies, the common cold, fever, exercise, healthy food, stress, friendship, honesty, teamwork, patience,
    courage, kindness, anger, fear, happiness, sadness, habits, goals, time management, reading, writing, listening,
    public speaking, saving money, traveling, cities, villages, farms, factories, deserts and their animals, coral
    reefs, tides, seasons, rainbows, shadows, mirrors, soap, ice, steam, clay, leather, cotton, silk, wool, candles,
    fire, lighthouses, castles, pyramids, submarines, helicopters, elevators, refrigerators, microwaves, washing
    machines, traffic lights, zippers, umbrellas, pencils, books
""")

QA_FORMS = entries("""
    What can you tell me about TOPIC?, Explain TOPIC to a child., Why is it useful to know about TOPIC?, Explain
    TOPIC in simple words., Give me three facts about TOPIC., Write a short paragraph about TOPIC., Why are people
    interested in TOPIC?, What should everyone know about TOPIC?, Give a short introduction to TOPIC., What is
    interesting about TOPIC?, I am a student. Teach me something about TOPIC., Answer briefly: why does TOPIC
    matter?, Describe TOPIC in a few sentences., What is the connection between TOPIC and TOPIC?, Compare TOPIC and
    TOPIC in a short paragraph., What is a good example to understand TOPIC?, How do TOPIC affect our daily life?,
    Name some common mistakes people make about TOPIC., How would you explain TOPIC to NAME who is ten years old?,
    What are the most important things about TOPIC?
""")

ACTIVITIES = entries("""
    learn a new language, bake bread, take care of a dog, write a letter, grow tomatoes, save money, sleep better,
    make new friends, prepare for an exam, clean a room, ride a bicycle, plan a birthday party, pack for a trip,
    cook rice, paint a wall, read more books, run faster, learn to swim, take good photos, fix a flat tire, tie a
    knot, build a bird house, make a paper boat, study history, speak in public, start a garden, calm down, save
    water, organize a desk, draw a face, play the guitar, choose a gift, make tea, wash a sweater, help a sad
    friend, train a cat, find a job, write a poem, stay warm in winter, keep bees, use a library, teach a child to
    read, remember names, eat healthy food, stop being late, learn chess
""")

HOWTO_FORMS = entries("""
    How do I ACTIVITY?, What is the best way to ACTIVITY?, Give me three tips to ACTIVITY., I want to ACTIVITY. What
    should I do first?, My friend NAME wants to ACTIVITY. What would you say?, Explain how to ACTIVITY in a few
    steps., Why is it hard to ACTIVITY?, Write short instructions for someone who wants to ACTIVITY.
""")


def split_items(items: list[str], split: str) -> list[str]:
    """The entries of a slot list that belong to a split ("train" or "test"); the two are disjoint."""
    if len(items) < 12:
        return items
    return [item for i, item in enumerate(items) if (i % 12 == 5) == (split == "test")]


def fill(rng: random.Random, form: str, split: str) -> str:
    """Replace the capitalised slots of a form, each occurrence by its own draw from the split's entries."""
    hero = "a TRAIT ANIMAL" if rng.random() < 0.45 else "NAME"
    slots: list[tuple[str, list[str]]] = [
        ("PERSONA", PERSONAS), ("LINE", CHAT_LINES), ("HERO", [hero]), ("EVENT", EVENTS), ("OBJECT", OBJECTS),
        ("PLACE", PLACES), ("ANIMAL", ANIMALS), ("TRAIT", TRAITS), ("NAME", NAMES), ("TOPIC", TOPICS),
        ("ACTIVITY", ACTIVITIES),
    ]  # fmt: skip
    for slot, items in slots:
        choices = split_items(items, split)
        while slot in form:
            form = form.replace(slot, rng.choice(choices), 1)
    return form
