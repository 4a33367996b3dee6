package aggregated

import (
	"context"
	"encoding/binary"
	"net/http"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/websocket"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

const (
	// plainProtocol is KubeVirt's websocket protocol. Its binary frames carry the data.
	plainProtocol = "plain.kubevirt.io"
	pingInterval  = time.Second
)

// Close codes of RFC 6455.
const (
	closeNormal   = 1000
	closeInternal = 1011
)

// maxReason is the length in bytes of the reason in a close frame: control frames have at most 125 bytes.
const maxReason = 123

// upgradable returns an error if r does not ask for a websocket that this API speaks. Errors: 400.
func upgradable(r *http.Request) error {
	if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") || r.Header.Get("Sec-WebSocket-Key") == "" {
		return apierrors.NewBadRequest("this subresource is a websocket: the request must be an upgrade to one")
	}
	if offered := protocols(r); len(offered) > 0 && !slices.Contains(offered, plainProtocol) {
		return apierrors.NewBadRequest("this subresource speaks only the websocket protocol " + plainProtocol)
	}
	return nil
}

func protocols(r *http.Request) (all []string) {
	for _, line := range r.Header.Values("Sec-WebSocket-Protocol") {
		for one := range strings.SplitSeq(line, ",") {
			all = append(all, strings.TrimSpace(one))
		}
	}
	return all
}

// socket is the server's side of a websocket. It reads and writes the data of binary frames.
type socket struct{ *websocket.Conn }

// upgrade answers with a websocket and calls serve with it. The client's connection ends when serve returns or ctx ends.
// While serve runs, the client gets a ping each second, so that nothing between the two takes the connection for dead.
func upgrade(ctx context.Context, w http.ResponseWriter, r *http.Request, serve func(socket) error) {
	server := websocket.Server{
		Handshake: func(c *websocket.Config, r *http.Request) error {
			c.Protocol = nil
			if slices.Contains(protocols(r), plainProtocol) {
				c.Protocol = []string{plainProtocol}
			}
			return nil
		},
		Handler: func(c *websocket.Conn) {
			c.PayloadType = websocket.BinaryFrame
			k := socket{c}
			defer context.AfterFunc(ctx, k.cut)()
			over := make(chan struct{})
			pinged := make(chan struct{})
			go func() { k.ping(over); close(pinged) }()
			err := serve(k)
			close(over)
			k.end(err)
			k.cut() // ends a ping that waits for the client
			<-pinged
		},
	}
	server.ServeHTTP(w, r)
}

// cut ends reads and writes.
func (k socket) cut() { _ = k.SetDeadline(time.Unix(1, 0)) }

func (k socket) ping(over <-chan struct{}) {
	codec := websocket.Codec{Marshal: func(any) ([]byte, byte, error) { return nil, websocket.PingFrame, nil }}
	every := time.NewTicker(pingInterval)
	defer every.Stop()
	for {
		select {
		case <-every.C:
			if codec.Send(k.Conn, nil) != nil {
				return // the reader sees it too
			}
		case <-over:
			return
		}
	}
}

// closeTimeout limits how long the close frame waits for a client that does not read.
const closeTimeout = time.Second

// end sends the close frame: 1000 for an ordinary end, else 1011 with the reason.
func (k socket) end(err error) {
	code, reason := uint16(closeNormal), ""
	if err != nil {
		code, reason = closeInternal, strings.ToValidUTF8(err.Error(), "?")
		if len(reason) > maxReason {
			reason = strings.ToValidUTF8(reason[:maxReason], "")
		}
	}
	_ = k.SetDeadline(time.Now().Add(closeTimeout))
	codec := websocket.Codec{Marshal: func(any) ([]byte, byte, error) {
		return append(binary.BigEndian.AppendUint16(nil, code), reason...), websocket.CloseFrame, nil
	}}
	_ = codec.Send(k.Conn, nil)
}

// cutReads ends reads only.
func (k socket) cutReads() { _ = k.SetReadDeadline(time.Unix(1, 0)) }
