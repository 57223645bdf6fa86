"""Inputs and heads of bidirectional encoders such as RoBERTa."""
