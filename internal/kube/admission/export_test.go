package admission

// Pair creates a certificate for a client that parent signs, or an authority if parent is nil.
var Pair = pair
