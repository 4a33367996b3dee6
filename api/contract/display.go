package contract

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// HeaderDisplay is a header of a request to attach to a pod over SPDY. The streams of such a request belong to the screen of the guest, not to
// its console. The value is a Display. Whoever may attach to a pod may see and use its screen.
const HeaderDisplay = "Cocoon-Display"

// Display is what a client wants of the screen of a guest.
type Display string

// The values. A picture is a PNG on the standard output; everything else is RFB (RFC 6143) on the standard streams, with the VM as server.
const (
	DisplayOpen        Display = "open"         // ends the connection that somebody has
	DisplayKeep        Display = "keep"         // is refused if somebody is connected
	DisplayPicture     Display = "picture"      // what the screen shows
	DisplayPictureWake Display = "picture-wake" // the same, after the mouse has moved
)

// ParseDisplay reads the value of HeaderDisplay.
func ParseDisplay(value string) (Display, error) {
	r := &reader{from: map[string]string{HeaderDisplay: value}}
	d := oneOf(r, HeaderDisplay, DisplayOpen, DisplayKeep, DisplayPicture, DisplayPictureWake)
	return d, r.errs.err()
}

// HeaderGuest is a header of an attach request over SPDY. Its value is a question to the guest of the pod. The answer is the standard
// output of the request. Whoever may attach to a pod may ask.
const HeaderGuest = "Cocoon-Guest"

// The values of HeaderGuest. All answers are JSON.
const (
	GuestDescription = "description" // the answer is an object with what the guest's qemu-guest-agent tells
	GuestThaw        = "thaw"        // ends a freeze; the answer is a GuestThawed
	guestFreeze      = "freeze "     // and a number of seconds
)

// MaxFreeze is the longest time for which the file systems of a guest can be frozen. It is KubeVirt's default.
const MaxFreeze = 5 * time.Minute

// GuestThawed is the answer to GuestThaw.
type GuestThawed struct {
	Held bool `json:"held"` // the file systems were frozen all the time until now
}

// GuestFreeze returns the value that freezes the file systems of the guest. The node thaws them after the time, if nobody has before.
func GuestFreeze(most time.Duration) string {
	return guestFreeze + strconv.Itoa(int(most.Round(time.Second)/time.Second))
}

// ParseGuestFreeze reads a value. It reports whether it asks for a freeze. Errors: the time is none.
func ParseGuestFreeze(value string) (most time.Duration, asks bool, err error) {
	number, asks := strings.CutPrefix(value, guestFreeze)
	if !asks {
		return 0, false, nil
	}
	n, err := strconv.ParseUint(number, 10, 32)
	most = time.Duration(n) * time.Second //nolint:gosec // 32 bits
	if err != nil || most < time.Second || most > MaxFreeze {
		return 0, true, fmt.Errorf("header %s: %q must be %sN with N from 1 to %d seconds", HeaderGuest, value, guestFreeze, MaxFreeze/time.Second)
	}
	return most, true, nil
}
