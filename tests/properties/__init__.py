"""Properties: what holds of every input, against inputs that nobody wrote down.

python -m pytest tests/properties                              # few examples, the same ones each time
python -m pytest tests/properties --hypothesis-profile long    # many, new ones each time; by hand
"""
