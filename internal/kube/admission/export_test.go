package admission

// Pair makes a certificate for a client that parent signs, or an authority where there is none.
var Pair = pair
