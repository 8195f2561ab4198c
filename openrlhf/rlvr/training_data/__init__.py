"""Training files from public data sets: every prompt once, with an id of its own, filtered and split as papers do.

    python -m openrlhf.rlvr.training_data prepare dapo --input BytedTsinghua-SIA/DAPO-Math-17k --output data/dapo \
        --tokenizer Qwen/Qwen2.5-Math-7B --exclude aime24.jsonl math500.jsonl
"""
