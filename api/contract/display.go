package contract

// HeaderDisplay is a header of a request to attach to a pod over SPDY. With it the stream is not that of the console, but of the screen of
// the guest, as its value (Display) says. Whoever may attach to a pod may see and use its screen.
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

// HeaderGuest is a header of a request to attach to a pod over SPDY. With it the standard output is not that of the pod, but what its value asks
// for. Whoever may attach to a pod may ask.
const HeaderGuest = "Cocoon-Guest"

// GuestDescription asks, in HeaderGuest, what the guest tells of itself: its qemu-guest-agent's answers, as a JSON object.
const GuestDescription = "description"
