"""What readers of sentences and of questions share: tokens that know their characters, stores."""
