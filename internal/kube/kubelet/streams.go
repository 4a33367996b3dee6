package kubelet

import (
	"io"
	"net/http"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	remote "k8s.io/apimachinery/pkg/util/remotecommand"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// openSPDY upgrades to SPDY and waits until the client has opened the streams that it requested.
func openSPDY(w http.ResponseWriter, r *http.Request, want requestedStreams) (*session, error) {
	protocol, err := httpstream.Handshake(r, w, []string{
		remote.StreamProtocolV5Name, remote.StreamProtocolV4Name, remote.StreamProtocolV3Name, remote.StreamProtocolV2Name,
	})
	if err != nil {
		return nil, err
	}
	type opened struct {
		httpstream.Stream
		replied <-chan struct{}
	}
	streams := make(chan opened, 8) // a client opens at most five streams
	conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(s httpstream.Stream, replied <-chan struct{}) error {
		select {
		case streams <- opened{s, replied}:
			return nil
		default:
			return errdefs.Exhaustedf("too many streams")
		}
	})
	if conn == nil {
		return nil, errdefs.Invalidf("the connection was not upgraded")
	}
	conn.SetIdleTimeout(streamIdle)
	sizable := want.tty && protocol != remote.StreamProtocolV2Name
	left := 1 + count(want.stdin, want.stdout, want.stderr, sizable)
	se := &session{
		plainStatus: protocol == remote.StreamProtocolV2Name || protocol == remote.StreamProtocolV3Name,
		lost:        closed(conn), close: func() { _ = conn.Close() },
	}
	limit := time.NewTimer(streamCreate)
	defer limit.Stop()
	for ; left > 0; left-- {
		select {
		case st := <-streams:
			switch st.Headers().Get(corev1.StreamType) {
			case corev1.StreamTypeError:
				se.status = st
			case corev1.StreamTypeStdin:
				se.stdin = st
			case corev1.StreamTypeStdout:
				se.stdout = st
			case corev1.StreamTypeStderr:
				se.stderr = st
			case corev1.StreamTypeResize:
				se.resize = st
			}
			select { // wait for the reply, so that it is sent before the connection can be closed
			case <-st.replied:
			case <-se.lost:
			case <-limit.C:
			}
		case <-se.lost:
			return nil, errdefs.Unavailablef("the client closed the connection")
		case <-limit.C:
			se.close()
			return nil, errdefs.Unavailablef("timed out waiting for the client to create streams")
		}
	}
	if se.status == nil {
		se.close()
		return nil, errdefs.Invalidf("the client opened no error stream")
	}
	return se, nil
}

func count(all ...bool) (n int) {
	for _, b := range all {
		if b {
			n++
		}
	}
	return n
}

func closed(conn httpstream.Connection) <-chan struct{} {
	out := make(chan struct{})
	go func() {
		<-conn.CloseChan()
		close(out)
	}()
	return out
}

// The channels of a websocket session. The last channel carries no data. A read of it ends when the connection ends.
const (
	chanStdin = iota
	chanStdout
	chanStderr
	chanError
	chanResize
	chanEnd
)

func openWebSocket(w http.ResponseWriter, r *http.Request, want requestedStreams) (*session, error) {
	only := func(on bool, kind wsstream.ChannelType) wsstream.ChannelType {
		if on {
			return kind
		}
		return wsstream.IgnoreChannel
	}
	channels := []wsstream.ChannelType{
		chanStdin: only(want.stdin, wsstream.ReadChannel), chanStdout: only(want.stdout, wsstream.WriteChannel),
		chanStderr: only(want.stderr, wsstream.WriteChannel),
		chanError:  wsstream.WriteChannel, chanResize: wsstream.ReadChannel, chanEnd: wsstream.ReadChannel,
	}
	binary := wsstream.ChannelProtocolConfig{Binary: true, Channels: channels}
	text := wsstream.ChannelProtocolConfig{Binary: false, Channels: channels}
	conn := wsstream.NewConn(map[string]wsstream.ChannelProtocolConfig{
		"": binary, "channel.k8s.io": binary, "base64.channel.k8s.io": text,
		"v4.channel.k8s.io": binary, "v4.base64.channel.k8s.io": text, "v5.channel.k8s.io": binary,
	})
	conn.SetIdleTimeout(streamIdle)
	protocol, streams, err := conn.Open(w, r)
	if err != nil {
		return nil, err
	}
	end := sync.OnceFunc(func() { _ = conn.Close() })
	lost := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, streams[chanEnd])
		close(lost)
	}()
	se := &session{
		status: streams[chanError], lost: lost, close: end,
		plainStatus: protocol == "" || protocol == "channel.k8s.io" || protocol == "base64.channel.k8s.io",
	}
	if want.stdin {
		se.stdin = streams[chanStdin]
	}
	if want.stdout {
		se.stdout = streams[chanStdout]
	}
	if want.stderr {
		se.stderr = streams[chanStderr]
	}
	if want.tty {
		se.resize = streams[chanResize]
	} else {
		go func() { _, _ = io.Copy(io.Discard, streams[chanResize]) }() // an unread channel would block all others
	}
	// A write on the lowest writable channel tells the client that the session is open.
	first := streams[chanError]
	if want.stdout {
		first = streams[chanStdout]
	}
	_, _ = first.Write(nil)
	return se, nil
}
