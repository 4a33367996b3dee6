package guestv1

// AbilityFileKeys is the ability of an agent that reads variables of containers from files; see FileKey.
const AbilityFileKeys = "file-keys"

// AbilitySandbox is the ability of an agent whose guest can wait for containers: SetupRequest.sandbox, Container.manual,
// StartContainer and RemoveContainer.
const AbilitySandbox = "sandbox"

// AbilitySystemCalls is the ability of an agent that filters system calls as it is told: Security.system_calls.
const AbilitySystemCalls = "system-calls"
