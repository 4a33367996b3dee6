package guestv1

// AbilityFileKeys is the ability of an agent that reads variables of containers from files; see FileKey.
const AbilityFileKeys = "file-keys"
