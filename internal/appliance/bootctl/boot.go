package bootctl

import "strings"

// Boot is how the system that runs was started, as the loader said on the kernel's command line.
type Boot struct {
	Slot  Slot   // None: not started from a slot
	Trial bool   // the loader counted one try down for it
	UID   string // the update on trial
	Files string // the id in the names of its boot files
}

// ParseBoot reads a kernel's command line, /proc/cmdline. Words that it does not know and values that are invalid count as not said; a trial without a slot
// is none.
func ParseBoot(cmdline string) Boot {
	var b Boot
	for word := range strings.FieldsSeq(cmdline) {
		key, value, _ := strings.Cut(word, "=")
		switch key {
		case "capsule.slot":
			if s := Slot(value); s == A || s == B {
				b.Slot = s
			}
		case "capsule.trial":
			b.Trial = value == "1"
		case "capsule.uid":
			if validID(value) {
				b.UID = value
			}
		case "capsule.files":
			if validID(value) {
				b.Files = value
			}
		}
	}
	if b.Slot == None {
		return Boot{}
	}
	if !b.Trial {
		b.UID = ""
	}
	return b
}
