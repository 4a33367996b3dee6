package contract

import (
	"regexp"
	"strings"
)

// Reboot is a request to start a guest again. A pod has the last one; its ID tells it from those before it.
type Reboot struct {
	Hard bool   // reset the guest at once, instead of letting it shut down in order
	ID   string // chosen by who asks
}

// The first words of a request.
const (
	rebootSoft = "soft"
	rebootHard = "hard"
)

var rebootID = regexp.MustCompile(`^[0-9A-Za-z-]{1,64}$`)

// ParseReboot returns the reboot request in the annotations of a pod. Without a request it returns the zero value. Every error is of type
// Errors.
func ParseReboot(annotations map[string]string) (Reboot, error) {
	v := annotations[KeyReboot]
	if v == "" {
		return Reboot{}, nil
	}
	how, id, _ := strings.Cut(v, " ")
	if how != rebootSoft && how != rebootHard || !rebootID.MatchString(id) {
		r := &reader{from: annotations}
		r.bad(KeyReboot, "must be soft or hard, and an ID of letters, digits and dashes")
		return Reboot{}, r.errs.err()
	}
	return Reboot{Hard: how == rebootHard, ID: id}, nil
}

// String is the value of the annotation.
func (r Reboot) String() string {
	if r.Hard {
		return rebootHard + " " + r.ID
	}
	return rebootSoft + " " + r.ID
}

// Rebooted is the node's answer to a request.
type Rebooted struct {
	ID  string // of the request
	Why string // why the guest is not rebooted; "": it is
}

// ParseRebooted reads the last answer, the zero value if there is none.
func ParseRebooted(annotations map[string]string) Rebooted {
	id, why, _ := strings.Cut(annotations[KeyRebooted], " ")
	return Rebooted{ID: id, Why: why}
}

// String is the value of the annotation.
func (r Rebooted) String() string { return strings.TrimSpace(r.ID + " " + r.Why) }
