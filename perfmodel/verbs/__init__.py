"""What a user can ask: request in, result out."""
