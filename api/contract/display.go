package contract

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

// HeaderGuest is a header of a request to attach to a pod over SPDY. The standard output of such a request is the answer to the value of the
// header. Whoever may attach to a pod may ask.
const HeaderGuest = "Cocoon-Guest"

// GuestDescription is the only value of HeaderGuest. The answer is a JSON object with what the guest's qemu-guest-agent tells.
const GuestDescription = "description"
