"""What maintains the tool and is no part of it."""
