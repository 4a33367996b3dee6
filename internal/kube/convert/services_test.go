package convert

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func service(namespace, name, ip string, ports ...corev1.ServicePort) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: corev1.ServiceSpec{ClusterIP: ip, Ports: ports}}
}

func TestServiceEnv(t *testing.T) {
	https := corev1.ServicePort{Name: "https", Port: 443, Protocol: corev1.ProtocolTCP}
	api := service("default", "kubernetes", "10.96.0.1", https)
	all := []*corev1.Service{
		api, service("default", "other", "10.96.0.2", https), service("shop", "web-front", "10.96.0.3", corev1.ServicePort{Port: 80}, corev1.ServicePort{Name: "dns-udp", Port: 53, Protocol: corev1.ProtocolUDP}),
		service("shop", "headless", corev1.ClusterIPNone, https), service("shop", "outside", ""), service("shop", "portless", "10.96.0.4"), service("shop", "six", "fd00::1", https),
	}
	const kubernetes = "KUBERNETES_SERVICE_HOST=10.96.0.1 KUBERNETES_SERVICE_PORT=443 KUBERNETES_SERVICE_PORT_HTTPS=443 KUBERNETES_PORT=tcp://10.96.0.1:443 " +
		"KUBERNETES_PORT_443_TCP=tcp://10.96.0.1:443 KUBERNETES_PORT_443_TCP_PROTO=tcp KUBERNETES_PORT_443_TCP_PORT=443 KUBERNETES_PORT_443_TCP_ADDR=10.96.0.1"
	const six = "SIX_SERVICE_HOST=fd00::1 SIX_SERVICE_PORT=443 SIX_SERVICE_PORT_HTTPS=443 SIX_PORT=tcp://[fd00::1]:443 SIX_PORT_443_TCP=tcp://[fd00::1]:443 " +
		"SIX_PORT_443_TCP_PROTO=tcp SIX_PORT_443_TCP_PORT=443 SIX_PORT_443_TCP_ADDR=fd00::1"
	const front = "WEB_FRONT_SERVICE_HOST=10.96.0.3 WEB_FRONT_SERVICE_PORT=80 WEB_FRONT_SERVICE_PORT_DNS_UDP=53 WEB_FRONT_PORT=tcp://10.96.0.3:80 " +
		"WEB_FRONT_PORT_80_TCP=tcp://10.96.0.3:80 WEB_FRONT_PORT_80_TCP_PROTO=tcp WEB_FRONT_PORT_80_TCP_PORT=80 WEB_FRONT_PORT_80_TCP_ADDR=10.96.0.3 " +
		"WEB_FRONT_PORT_53_UDP=udp://10.96.0.3:53 WEB_FRONT_PORT_53_UDP_PROTO=udp WEB_FRONT_PORT_53_UDP_PORT=53 WEB_FRONT_PORT_53_UDP_ADDR=10.96.0.3"
	for name, tc := range map[string]struct {
		links    *bool
		services []*corev1.Service
		want     string
	}{
		"those of the namespace":     {nil, all, kubernetes + " " + six + " " + front},
		"no links":                   {ptr(false), all, kubernetes},
		"its own kubernetes":         {ptr(true), []*corev1.Service{service("shop", "kubernetes", "10.96.0.9", https), api}, strings.ReplaceAll(kubernetes, "10.96.0.1", "10.96.0.9")},
		"the same, sorted otherwise": {ptr(true), []*corev1.Service{api, service("shop", "kubernetes", "10.96.0.9", https)}, strings.ReplaceAll(kubernetes, "10.96.0.1", "10.96.0.9")},
		"none":                       {nil, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			pod := plain(func(p *corev1.Pod) { p.Namespace, p.Spec.EnableServiceLinks = "shop", tc.links })
			var got []string
			for _, e := range serviceEnv(pod, tc.services) {
				got = append(got, e.Name+"="+e.Value)
			}
			if s := strings.Join(got, " "); s != tc.want {
				t.Errorf("\n%s\nwant\n%s", s, tc.want)
			}
		})
	}

	// The pod's own variables take precedence, and may refer to a Service.
	pod := plain(on(func(c *corev1.Container) {
		c.Env = []corev1.EnvVar{{Name: "URL", Value: "https://$(KUBERNETES_SERVICE_HOST)"}, {Name: "KUBERNETES_SERVICE_HOST", Value: "mine"}}
	}))
	env, err := Env(t.Context(), pod, Node{}, cluster{}, all, nil)
	if err != nil {
		t.Fatal(err)
	}
	values := env["c"].values()
	if values["URL"] != "https://10.96.0.1" || values["KUBERNETES_SERVICE_HOST"] != "mine" || values["OTHER_SERVICE_HOST"] != "10.96.0.2" {
		t.Errorf("the environment is %v", values)
	}
}
