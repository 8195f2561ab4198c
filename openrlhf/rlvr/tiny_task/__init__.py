"""A model of 300,000 parameters and arithmetic that it half knows: reinforcement learning in minutes, on a CPU.

The model is warmed up on worked answers. In the first half all are right, so that it learns to calculate; in the second
half many hold the slip that is typical of their level (a dropped carry, a sum in place of a product), and some lack the
box. The warmed-up model therefore knows two ways of answering, and on the harder levels its most likely answer is the
wrong one. That is what makes the task a test of the reward: rewards move the weight to the right way, on problems never
seen as well; merely becoming more certain, or rewards that tell nothing, do not.
"""
