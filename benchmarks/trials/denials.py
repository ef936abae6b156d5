"""Answers that are denied, hidden, hedged, only thought or several, and honest ones beside the same words.

The gold answer is 5, of the choices B.
"""

TAGGED = (  # what an answer tag holds: 0
    "x != \\boxed{5}", "x \\not= \\boxed{5}", "2+3 = 5. But it is not \\boxed{5}", "\\boxed{5}. 6", "43 \\boxed{5}",
    "not \\boxed{5}", "anything but \\boxed{5}", "\\boxed{5} is wrong", "\\boxed{5} or 6", "either \\boxed{5}",
    "x \\neq \\boxed{5}", "$\\ne$ \\boxed{5}", "not 5", "never $5$", "5 is wrong", "It isn't \\boxed{5}",
    "It isn\u2019t \\boxed{5}", "It is NOT \\boxed{5}.", "\\boxed{5}? No.", "\\text{not }\\boxed{5}",
    "-\\boxed{5}", "twice \\boxed{5}", "half of \\boxed{5}", "\\boxed{5}x", "\\boxed{5}^2", "\\boxed{5} squared",
    "about \\boxed{5}", "more than \\boxed{5}", "at least \\boxed{5}", "\\boxed{5}, maybe six",
    "neither \\boxed{5} nor six", "everything except \\boxed{5}", "~~5~~", "the opposite of \\boxed{5}",
    "~~\\boxed{5}~~", "\\cancel{5}", "\\cancel{\\boxed{5}}", "\\phantom{5}", "<!-- 5 -->", "5, 6", "5;6", "5 / 6",
    "5?6", "5 or six", "5<answer>6</answer>", "6<answer>5</answer>", "5</answer><answer>6", "The answer is not 5",
    "The wrong answer is 5", "6. The answer is 5", "five or $5$", "The value is $5$ or six", "There are 5 or six",
    "There are fewer than 5 apples", "I have no idea, 5", "\\boxed{4}\\boxed{5}",
    "\\text{anything but }\\boxed{5}", "5 and 6", "[5, 6]", "\\{5, 6\\}", "5 (or 6)", "5 \u2260", "\u2260 5",
    "$5$ is false", "\\boxed{5} is not it", "5, 5.5", "1 2 3 4 5",
)  # fmt: skip
BOXED = (  # boxes in running text: 0
    "not \\boxed{5}", "The answer is not \\boxed{5}.", "The answer is certainly not $\\boxed{5}$.",
    "It is not equal to \\boxed{5}.", "x \\neq \\boxed{5}", "$x \\ne \\boxed{5}$", "\\boxed{5} is wrong.",
    "\\boxed{5} is incorrect", "$\\boxed{5}$ is not the answer.", "\\boxed{5} \u274c",
    "$\\boxed{5}$ is not correct.", "\\boxed{5} isn't right", "\\boxed{5}. That is wrong.",
    "\\boxed{5}. No, that's wrong.", "\\boxed{5} (wrong)", "\\boxed{5}, just kidding", "\\boxed{5} or 6",
    "\\boxed{5} or six", "$\\boxed{5}$ or $6$", "6 or \\boxed{5}", "either 6 or \\boxed{5}",
    "\\boxed{5} or maybe 7", "\\boxed{5} or \\boxed{6}", "~~\\boxed{5}~~", "<del>\\boxed{5}</del>",
    "<s>\\boxed{5}</s>", "<!-- \\boxed{5} -->", "<!-- \\boxed{5}", "% \\boxed{5}", "\\iffalse \\boxed{5} \\fi",
    "\\phantom{\\boxed{5}}", "\\cancel{\\boxed{5}}", "\\xcancel{\\boxed{5}}", "\\boxed{5",
    "\\bcancel{x \\boxed{5}}", "\\sout{\\boxed{5}}", "\\boxed{\\cancel{5}}", "\\boxed{\\phantom{5}}",
    "\\boxed{\\text{not }5}", "\\boxed{\\neq 5}", "\\boxed{x \\neq 5}", "\\boxed{5 \\text{ or } 6}",
    "\\boxed{\\text{either }5}", "\\boxed{\\text{anything but }5}", "\\boxed{5}\\boxed{6}",
    "\\boxed{\\boxed{5} 6}", "instead of \\boxed{5}", "rather than \\boxed{5}", "\\boxed{1,2,3,4,5}",
    "\\boxed{5}\\boxed{}", "\\boxed{\uff15}", "\\boxed{\U0001d7d3}",
)  # fmt: skip
THOUGHT = (  # only thought: 0
    "<think>\\boxed{5}", "<think>The answer is 5", "<think><answer>5</answer>",
    "<think>hm</think><think>\\boxed{5}", "<THINK>\\boxed{5}", "<thinking>\\boxed{5}", "<reasoning>\\boxed{5}",
    "<think >\\boxed{5}", "\\boxed{5}</think>", "<think>\\boxed{5}</think>", "<think>#### 5",
    "<think>\\boxed{5}</think><think>", "<think>a</think> no <think> \\boxed{5}", "<scratchpad>The answer is 5.",
)  # fmt: skip
SAID = (  # sentences: 0
    "The answer is not 5", "The answer is 5 or 6", "The answer is 5. No, 6.", "The answer is 5. Wait, no.",
    "The answer is 5? No.", "The answer is 5. That is wrong.", "The answer is 5 is wrong",
    "The answer is $5$ is wrong", "The answer is $5$, which is wrong.", "The answer is anything but 5",
    "The answer is anything but $5$", "The answer is either 5", "The answer is 5; 6", "The answer is 5. 6. 7.",
    "The answer is 5/6/7", "Answer: 5, 6", "Answer: 5 and 6", "Answer: not $5$", "A wrong answer is 5.",
    "The wrong answer is $5$", "An incorrect answer: 5", "I doubt that the answer is 5",
    "I don't think the answer is 5", "It is not true that the answer is 5.",
    "If the answer is 5, then I am a cat.", "Not the answer: 5", "The answer is never 5", "The answer is ~~5~~",
    "The answer is ~~5~~ 6", "The answer is at least 5", "The answer is about 5", "The answer is minus 5",
    "The answer is less than 5", "The answer is between 5 and 6", "#### not 5", "#### 5 or 6", "#### 5 #### 6",
    "#### ~~5~~", "The answer is x + 5", "The answer is sqrt 5", "The answer is log 5", "Answer: 5 - 6",
    "The answer is twice 5", "The answer is 5 times two", "The answer is 4. No, the answer is 5",
    "The answer is $5$, alternatively $6$", "The answer is not 5. The answer is not 6.", "The answer, then, is not 5.",
    "The answer turns out to be anything but 5", "The answer of 5 is wrong.", "The answer is $5$, $6$",
    "Answer: $5$, $6$.",
    "The answer is 5 (6).", "The answer is 5 (or 6).", "The answer is 5 (2 * 3).", "The answer is not 5 but 6.",
    "The answer is 6 rather than 5.", "The answer is 6 instead of 5.", "Answer: 6 \u2713 5", "The answer -> 6, 5",
    "Die Antwort ist nicht 5.", "La respuesta no es 5.", "La respuesta es no 5.",
    "La r\u00e9ponse est pas 5.", "La r\u00e9ponse n'est pas 5.", "Jibu ni sio 5.", "\u7b54\u6848\u662f\u4e0d5\u3002",
    "\u041e\u0442\u0432\u0435\u0442 \u2014 \u043d\u0435 5.", "Antwort: nicht 5",
    "\\textbf{Answer:} not 5", "The answer (which is not 5) is 6.",
)  # fmt: skip
HONEST = (  # 1
    "<answer>So $2+3=\\boxed{5}$.</answer>", "<answer>There are 2 and 3. So it is \\boxed{5} in all.</answer>",
    "This is not prime, so the answer is \\boxed{5}.", "There are not 6 but \\boxed{5} ways.",
    "\\boxed{5}. No others exist.", "We cannot have x = 3. Hence \\boxed{5}.",
    "\\boxed{5}. This is not surprising.", "\\boxed{5}, not 6.", "\\boxed{5} or $10/2$",
    "\\boxed{5} cannot be simplified further.", "$\\boxed{5}$ which is not divisible by 3.",
    "\\boxed{5} or, equivalently, $10/2$.", "~~\\boxed{6}~~ \\boxed{5}", "The answer is ~~6~~ 5",
    "<think>\\boxed{6}</think> \\boxed{5}", "\\boxed{5} <think>hm", "The answer is 5, not 6.",
    "The answer is $5$. This is not surprising.", "Since this is not prime, the answer is 5.",
    "The answer is 5, so the answer is 5.", "The intermediate answer is 3. The final answer is 5.",
    "<answer>Therefore, Natalia sold \\boxed{5} clips altogether.</answer>",
    "<answer>Natalia sold $5$ clips in April and May.</answer>",
    "<answer>She needs \\boxed{5} more dollars</answer>", "\\boxed 5", "<answer>x = \\boxed{5}</answer>",
    "I put it in <answer> tags: <answer>5</answer>", "Answer: There are 5 ways.", "The answers are 5.",
    "<answer>\u200b5\u200b</answer>", "\\boxed{\u200b5}", "<answer>5\ufeff</answer>", "The answer is \"5\".",
    "The answer is that she has 5 apples.", "Answer: [5]", "The answer is not 6 but 5.",
    "The answer is not 6. The answer is 5.",
    "The answer is 5 rather than 6.", "The answer is 5 (10/2).", "The answer is 5 (or 5.0).",
    "The answer is 5 (i.e., 10/2).",
    "\\boxed{5} or 500%", "The answer is $5$, or $10/2$.", "\\boxed{5} \u2713",
)  # fmt: skip
TWO_OPTIONS = (  # choices that name two options or deny one: 0
    "A and B", "B and A", "A or B", "Both (A) and (B)", "A, B", "B, A", "not B", "(B) (A)", "B/A", "B & A", "B; A",
    "B + A", "B) and A)", "B. A.", "neither B\nB. also C", "B. Also C", "B. maybe C", "B. Paris, A",
    "B. No, it is C.", "B. Wait, C", "B. Actually (C)", "B. Sorry, I mean C",
    "(B) Paris, C", "B. Paris and C. Rome", "(B) Paris or (C)", "B, or maybe C", "B as well as C\nB. is wrong",
    "(B) is wrong", "B is not the answer", "(B) not this", "anything but B", "either B", "B or not", "B. Paris\nC",
    "A B", "AB", "all of A and B", "B \\text{ and } C", "B, C", "Not (B)",
)  # fmt: skip
ONE_OPTION = (  # choices: 1
    "B", "(B)", "b", "B.", "**B**", "B) Paris", "B. Paris", "option B", "B. Vitamin C", "B. Rome and Paris",
    "B: Paris", "[B]", "\\text{B}", "(B) Paris", "B. No", "B. No, it does not.", "B. Wait and see",
)  # fmt: skip
