package promshare_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/promshare"
)

// A replica stands for a window that replicas share. At each scrape it has decided more, and every other time it is
// without the others.
type replica struct{ scrapes atomic.Uint64 }

func (r *replica) Stats() quotashare.Stats {
	n := r.scrapes.Add(1)
	s := quotashare.Stats{Quota: 1000, Shared: &quotashare.SharedStats{
		Mode: "local(0.5)", Outages: n / 2, Alone: n, Disagreements: n, Pending: 3, Dropped: n,
	}}
	for class := range s.Classes {
		c := &s.Classes[class]
		c.Admitted = n
		c.Refused[quotashare.ReasonNone] = n
	}
	if n%2 == 1 {
		s.Shared.Away = errors.New("it does not answer")
	}
	return s
}

// metricsOf serves the metrics of windows.
func metricsOf(t *testing.T, windows map[string]promshare.Window) http.Handler {
	t.Helper()
	collector, err := promshare.NewCollector(windows)
	require.NoError(t, err)
	registry := prometheus.NewRegistry()
	registry.MustRegister(collector)
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{})
}

// series returns all series of a window and of a shared one as they stand on a page, in the form of plain.
func series(t *testing.T) map[string]bool {
	t.Helper()
	window, err := quotashare.NewWindow(quotashare.Quota{Tokens: 1000})
	require.NoError(t, err)
	page := httptest.NewRecorder()
	metricsOf(t, map[string]promshare.Window{"own": window, "shared": &replica{}}).
		ServeHTTP(page, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	all := map[string]bool{}
	for line := range strings.Lines(page.Body.String()) {
		if !strings.HasPrefix(line, "#") {
			all[plain(line[:strings.LastIndex(line, " ")])] = true
		}
	}
	require.NotEmpty(t, all)
	return all
}

var label = regexp.MustCompile(`(\w+)="([^"]*)"`)

// plain returns a series with its labels in the order of their names, without those whose values are not the package's.
func plain(series string) string {
	name, labels, _ := strings.Cut(series, "{")
	var kept []string
	for _, l := range label.FindAllStringSubmatch(labels, -1) {
		if !slices.Contains([]string{"window", "mode", "instance"}, l[1]) {
			kept = append(kept, l[0])
		}
	}
	slices.Sort(kept)
	return name + "{" + strings.Join(kept, ",") + "}"
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.FromSlash(file))
	require.NoError(t, err)
	return string(text)
}

type alert struct {
	Alert       string            `yaml:"alert"`
	Expr        string            `yaml:"expr"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

func alerts(t *testing.T) []alert {
	t.Helper()
	var file struct {
		Groups []struct {
			Rules []alert `yaml:"rules"`
		} `yaml:"groups"`
	}
	require.NoError(t, yaml.Unmarshal([]byte(read(t, "alerts.yaml")), &file))
	require.Len(t, file.Groups, 1)
	return file.Groups[0].Rules
}

func names(t *testing.T) (names []string) {
	t.Helper()
	for _, a := range alerts(t) {
		names = append(names, a.Alert)
	}
	return names
}

type panel struct {
	Type        string `json:"type"`
	Title       string `json:"title"`
	Description string `json:"description"`
	FieldConfig struct {
		Defaults struct {
			Unit string `json:"unit"`
		} `json:"defaults"`
	} `json:"fieldConfig"`
	Datasource *source `json:"datasource"`
	Targets    []struct {
		Datasource *source `json:"datasource"`
		Expr       string  `json:"expr"`
	} `json:"targets"`
	Panels []panel `json:"panels"`
}

type source struct {
	UID string `json:"uid"`
}

// panels returns the panels of the dashboard, but for its rows.
func panels(t *testing.T) (all []panel) {
	t.Helper()
	var dashboard struct {
		ID         *int    `json:"id"`
		Panels     []panel `json:"panels"`
		Templating struct {
			List []struct {
				Name       string `json:"name"`
				Type       string `json:"type"`
				Definition string `json:"definition"`
			} `json:"list"`
		} `json:"templating"`
	}
	require.NoError(t, json.Unmarshal([]byte(read(t, "dashboard.json")), &dashboard))
	require.Nil(t, dashboard.ID)
	variables := dashboard.Templating.List
	require.Len(t, variables, 2)
	require.Equal(t, "datasource datasource", variables[0].Type+" "+variables[0].Name)
	require.Equal(t, "query window", variables[1].Type+" "+variables[1].Name)
	require.Equal(t, "label_values(quotashare_quota_tokens,window)", variables[1].Definition)
	for _, p := range dashboard.Panels {
		require.Empty(t, p.Panels)
		if p.Type != "row" {
			all = append(all, p)
		}
	}
	require.NotEmpty(t, all)
	return all
}

// TestFilesNameMetricsThatExist holds the dashboard, the alerts and the page against what the Collector shows, and the
// Collector against the dashboard: a metric that no panel shows helps nobody.
func TestFilesNameMetricsThatExist(t *testing.T) {
	exist := map[string]bool{}
	for s := range series(t) {
		name, _, _ := strings.Cut(s, "{")
		exist[name] = true
	}
	metric := regexp.MustCompile(`quotashare_\w+`)
	for _, file := range []string{"dashboard.json", "alerts.yaml", "alerts_test.yaml", "README.md"} {
		for _, name := range metric.FindAllString(read(t, file), -1) {
			assert.True(t, exist[name], "%s: %s", file, name)
		}
	}
	dashboard := read(t, "dashboard.json")
	for name := range exist {
		base := strings.TrimSuffix(strings.TrimSuffix(name, "_sum"), "_count")
		assert.Contains(t, dashboard, base)
	}
}

// TestFilesNameLabelsThatExist does the same for the values of labels.
func TestFilesNameLabelsThatExist(t *testing.T) {
	exist := map[string]bool{}
	for s := range series(t) {
		for _, l := range label.FindAllString(s, -1) {
			exist[l] = true
		}
	}
	expressions := ""
	for _, a := range alerts(t) {
		expressions += a.Expr
	}
	for _, p := range panels(t) {
		for _, target := range p.Targets {
			expressions += strings.ReplaceAll(target.Expr, `window="$window"`, "")
		}
	}
	matchers := regexp.MustCompile(`(\w+)[=!]~?"([^"]*)"`).FindAllStringSubmatch(expressions, -1)
	require.NotEmpty(t, matchers)
	for _, m := range matchers {
		for value := range strings.SplitSeq(m[2], "|") {
			assert.True(t, exist[m[1]+`="`+value+`"`], "%s", m[0])
		}
	}
}

// TestAlertsAreExplained finds a heading of the page for each alert, in the same order, and the alert's link to it.
func TestAlertsAreExplained(t *testing.T) {
	var headings []string
	for _, h := range regexp.MustCompile(`(?m)^### (.*)$`).FindAllStringSubmatch(read(t, "README.md"), -1) {
		headings = append(headings, h[1])
	}
	require.Equal(t, headings, names(t))
	for _, a := range alerts(t) {
		at := "https://github.com/quotashare/quotashare/tree/main/promshare#" + strings.ToLower(a.Alert)
		assert.Equal(t, at, a.Annotations["runbook_url"])
		assert.NotEmpty(t, a.Annotations["summary"])
		assert.Contains(t, []string{"critical", "warning"}, a.Labels["severity"])
	}
}

func TestPanelsAreExplained(t *testing.T) {
	seen := map[string]bool{}
	for _, p := range panels(t) {
		assert.NotEmpty(t, p.Title)
		assert.False(t, seen[p.Title], p.Title)
		seen[p.Title] = true
		assert.NotEmpty(t, p.Description, p.Title)
		assert.NotEmpty(t, p.FieldConfig.Defaults.Unit, p.Title)
		require.NotEmpty(t, p.Targets, p.Title)
		for _, target := range p.Targets {
			for _, s := range []*source{p.Datasource, target.Datasource} {
				require.NotNil(t, s, p.Title)
				assert.Equal(t, "${datasource}", s.UID)
			}
		}
	}
}

// TestAlertTestsAreOfRealSeries keeps the tests of the alerts to series that the Collector shows, and finds for each
// alert a test in which it fires, beside a series for which it does not, and one in which it does not fire yet.
func TestAlertTestsAreOfRealSeries(t *testing.T) {
	var file struct {
		Tests []struct {
			Name        string `yaml:"name"`
			InputSeries []struct {
				Series string `yaml:"series"`
			} `yaml:"input_series"`
			AlertRuleTest []struct {
				Alertname string `yaml:"alertname"`
				ExpAlerts []struct {
					ExpLabels map[string]string `yaml:"exp_labels"`
				} `yaml:"exp_alerts"`
			} `yaml:"alert_rule_test"`
		} `yaml:"tests"`
	}
	require.NoError(t, yaml.Unmarshal([]byte(read(t, "alerts_test.yaml")), &file))
	exist := series(t)
	var tested []string
	for _, test := range file.Tests {
		tested = append(tested, test.Name)
		windows := map[string]bool{}
		for _, s := range test.InputSeries {
			assert.True(t, exist[plain(s.Series)], s.Series)
			windows[regexp.MustCompile(`window="(\w[\w-]*)"`).FindStringSubmatch(s.Series)[1]] = true
		}
		quiet, fires := false, map[string]bool{}
		for _, e := range test.AlertRuleTest {
			assert.Equal(t, test.Name, e.Alertname)
			quiet = quiet || len(e.ExpAlerts) == 0
			for _, a := range e.ExpAlerts {
				fires[a.ExpLabels["window"]] = true
			}
		}
		assert.True(t, quiet, "%s: does not fire yet", test.Name)
		assert.NotEmpty(t, fires, "%s: fires", test.Name)
		assert.Less(t, len(fires), len(windows), "%s: does not fire beside it", test.Name)
	}
	require.Equal(t, names(t), tested)
}

func TestAlertRules(t *testing.T) {
	promtool(t, nil, "check", "rules", "alerts.yaml")
	promtool(t, nil, "test", "rules", "alerts_test.yaml")
}

// promtool runs it and requires that it finds no fault.
func promtool(t *testing.T, in io.Reader, args ...string) {
	t.Helper()
	cmd := exec.Command(installed(t, "promtool"), args...)
	cmd.Stdin = in
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "promtool %s: %s", strings.Join(args, " "), out)
	if args[1] == "metrics" {
		require.Empty(t, string(out))
	}
}

// installed returns the path of a program of Debian's package prometheus.
func installed(t *testing.T, program string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		t.Skipf("%s is not installed: apt-get install prometheus", program)
	}
	return path
}

// TestPrometheus scrapes the example service with a real Prometheus, and beside it a page of a shared window, and asks
// it what the dashboard asks.
func TestPrometheus(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes and waits for scrapes")
	}
	program := installed(t, "prometheus")
	service := startService(t)
	shared := httptest.NewServer(metricsOf(t, map[string]promshare.Window{"shared": &replica{}}))
	t.Cleanup(shared.Close)
	server := startPrometheus(t, program, service, shared.URL)

	for _, page := range []string{service, shared.URL} {
		answer, err := http.Get(page + "/metrics")
		require.NoError(t, err)
		text, err := io.ReadAll(answer.Body)
		require.NoError(t, errors.Join(err, answer.Body.Close()))
		promtool(t, bytes.NewReader(text), "check", "metrics")
	}

	await(t, "targets up", func() error {
		var targets struct {
			ActiveTargets []struct{ Health, LastError, ScrapeURL string }
		}
		if err := server.get("targets", nil, &targets); err != nil {
			return err
		}
		if len(targets.ActiveTargets) != 2 {
			return fmt.Errorf("%d targets: want 2", len(targets.ActiveTargets))
		}
		for _, target := range targets.ActiveTargets {
			if target.Health != "up" || target.LastError != "" {
				return fmt.Errorf("%s is %s: %s", target.ScrapeURL, target.Health, target.LastError)
			}
		}
		return nil
	})

	await(t, "rules evaluated", func() error {
		var rules struct {
			Groups []struct {
				Rules []struct{ Name, Health, LastError string }
			}
		}
		if err := server.get("rules", nil, &rules); err != nil {
			return err
		}
		var loaded []string
		for _, group := range rules.Groups {
			for _, rule := range group.Rules {
				if rule.Health != "ok" || rule.LastError != "" {
					return fmt.Errorf("%s is %s: %s", rule.Name, rule.Health, rule.LastError)
				}
				loaded = append(loaded, rule.Name)
			}
		}
		if !slices.Equal(loaded, names(t)) {
			return fmt.Errorf("the rules are %v: want those of alerts.yaml", loaded)
		}
		return nil
	})

	// What the variable of the dashboard offers.
	await(t, "names of windows", func() error {
		var windows []string
		err := server.get("label/window/values", url.Values{"match[]": {"quotashare_quota_tokens"}}, &windows)
		if err == nil && !slices.Equal(windows, []string{"fake-model", "shared"}) {
			return fmt.Errorf("windows are %q", windows)
		}
		return err
	})

	for _, p := range panels(t) {
		for _, target := range p.Targets {
			window := "fake-model"
			if strings.Contains(target.Expr, "quotashare_shared_") {
				window = "shared"
			}
			query := strings.NewReplacer("$window", window, "$__rate_interval", "8s").Replace(target.Expr)
			require.NotContains(t, query, "$", "all variables are known")
			await(t, "data for "+p.Title+": "+query, func() error { return server.query(query) })
		}
	}
}

// await waits until what is asked for is as it should be, and otherwise tells why it is not.
func await(t *testing.T, what string, ask func() error) {
	t.Helper()
	check := func(c *assert.CollectT) { assert.NoError(c, ask()) }
	require.EventuallyWithT(t, check, 30*time.Second, 50*time.Millisecond, what)
}

// startService builds and starts the example service, ends it with the test, and returns its address.
func startService(t *testing.T) (url string) {
	t.Helper()
	program := filepath.Join(t.TempDir(), "service")
	build := exec.Command("go", "build", "-o", program, ".")
	build.Dir = filepath.FromSlash("../internal/service")
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))

	cmd := exec.Command(program, "-addr", "127.0.0.1:0", "-window", "4s")
	var failed bytes.Buffer
	cmd.Stderr = &failed
	printed, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		kill := time.AfterFunc(20*time.Second, func() { _ = cmd.Process.Kill() })
		defer kill.Stop()
		assert.NoError(t, cmd.Wait(), "the service ends when it is told to: %s", &failed)
	})
	// Its last line is the address of the provider.
	text := ""
	for buf := make([]byte, 1024); !strings.Contains(text, "provider"); {
		n, err := printed.Read(buf)
		text += string(buf[:n])
		require.NoError(t, err, "the service prints its addresses: %s%s", text, &failed)
	}
	at := regexp.MustCompile(`(?m)^metrics +(http://127\.0\.0\.1:\d+)/metrics$`).FindStringSubmatch(text)
	require.NotNil(t, at, text)
	return at[1]
}

type prometheusServer string

// startPrometheus starts a Prometheus that scrapes the targets and evaluates alerts.yaml, and ends it with the test.
func startPrometheus(t *testing.T, program string, targets ...string) prometheusServer {
	t.Helper()
	dir := t.TempDir()
	rules, err := filepath.Abs("alerts.yaml")
	require.NoError(t, err)
	for i := range targets {
		targets[i] = strings.TrimPrefix(targets[i], "http://")
	}
	config, err := json.Marshal(map[string]any{ // which is YAML too
		"global":     map[string]any{"scrape_interval": "500ms", "evaluation_interval": "1s"},
		"rule_files": []string{rules},
		"scrape_configs": []any{map[string]any{
			"job_name": "service", "static_configs": []any{map[string]any{"targets": targets}},
		}},
	})
	require.NoError(t, err)
	file := filepath.Join(dir, "prometheus.yml")
	require.NoError(t, os.WriteFile(file, config, 0o600))
	promtool(t, nil, "check", "config", file)

	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := l.Addr().String()
	require.NoError(t, l.Close())
	var log bytes.Buffer
	cmd := exec.Command(program, "--config.file="+file, "--storage.tsdb.path="+filepath.Join(dir, "data"),
		"--web.listen-address="+addr, "--log.level=warn")
	cmd.Stdout, cmd.Stderr = &log, &log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		kill := time.AfterFunc(20*time.Second, func() { _ = cmd.Process.Kill() })
		defer kill.Stop()
		assert.NoError(t, cmd.Wait(), "%s", &log)
	})
	server := prometheusServer("http://" + addr)
	await(t, "Prometheus is ready", func() error {
		answer, err := http.Get(string(server) + "/-/ready")
		if err != nil {
			return err
		}
		if answer.StatusCode != http.StatusOK {
			err = errors.New(answer.Status)
		}
		return errors.Join(err, answer.Body.Close())
	})
	return server
}

// get asks the API.
func (s prometheusServer) get(what string, parameters url.Values, into any) error {
	answer, err := http.Get(string(s) + "/api/v1/" + what + "?" + parameters.Encode())
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	var body struct {
		Error string
		Data  json.RawMessage
	}
	if err := json.NewDecoder(answer.Body).Decode(&body); err != nil {
		return err
	}
	if body.Error != "" {
		return errors.New(body.Error)
	}
	return json.Unmarshal(body.Data, into)
}

// query returns nil if the answer to a query has a series whose value is a number.
func (s prometheusServer) query(query string) error {
	var result struct {
		ResultType string
		Result     []struct{ Value [2]any }
	}
	if err := s.get("query", url.Values{"query": {query}}, &result); err != nil {
		return err
	}
	if result.ResultType != "vector" {
		return fmt.Errorf("the answer is a %s", result.ResultType)
	}
	for _, one := range result.Result {
		text, _ := one.Value[1].(string)
		if value, err := strconv.ParseFloat(text, 64); err == nil && !math.IsNaN(value) {
			return nil
		}
	}
	return fmt.Errorf("no number in %d series", len(result.Result))
}
