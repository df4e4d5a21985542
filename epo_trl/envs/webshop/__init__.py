"""WebShop: buy the product that an instruction asks for, from a shop that is shown as text."""
